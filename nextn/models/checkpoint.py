"""Directories of safetensors files: which tensor lies where, and writing new ones byte for byte.

Headers are read and checked here (a file of the wrong length never reaches the mapper); tensor data is read
through the safetensors library. Only files that somebody asks about are opened, so that a directory which
holds a part of a large checkpoint's shards serves whoever needs that part.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nextn.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"

_ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2,
    "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
_MAX_HEADER_BYTES = 100_000_000
_CHUNK_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor on disk: its safetensors dtype code, its shape and its bytes [begin, end) in `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Size on disk in bytes."""
        return self.end - self.begin

    def chunks(self) -> Iterator[bytes]:
        """The tensor's bytes in order, in pieces of at most 16 MiB."""
        with self.file.open("rb") as stream:
            stream.seek(self.begin)
            left = self.nbytes
            while left:
                piece = stream.read(min(left, _CHUNK_BYTES))
                if not piece:
                    raise CheckpointError(f"{self.file} ended inside {self.name}; the file is truncated")
                left -= len(piece)
                yield piece


class Checkpoint:
    """The tensors of one directory: one .safetensors file, or an index and the shards that it names.

    Raises `CheckpointError` where the directory holds neither, or several files and no index.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._headers: dict[Path, dict[str, StoredTensor]] = {}
        index = _find_index(path)
        if index is not None:
            self.source = index
            self._files = {name: path / file for name, file in _read_index(index).items()}
        else:
            self.source = _only_file(path)
            self._files = dict.fromkeys(self.header(self.source), self.source)

    def names(self) -> KeysView[str]:
        """Names of all tensors, as the index (or the only file) gives them."""
        return self._files.keys()

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def file_of(self, name: str) -> Path:
        """The file in which the index places `name`; the file need not exist."""
        return self._files[name]

    def require_files(self, names: Iterable[str]) -> list[Path]:
        """The files that hold `names`, sorted; raises `CheckpointError` with all that do not exist."""
        files = sorted({self._files[name] for name in names})
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise CheckpointError(f"{self.source} names files that do not exist: {shorten(missing)}")
        return files

    def header(self, file: Path) -> Mapping[str, StoredTensor]:
        """All tensors that `file` itself holds, whatever the index says; read once."""
        if file not in self._headers:
            self._headers[file] = read_header(file)
        return self._headers[file]

    def find(self, name: str) -> StoredTensor | None:
        """Where `name` lies, or None if its file does not hold it although the index says so."""
        return self.header(self._files[name]).get(name)


def shorten(names: Sequence[str], most: int = 5) -> str:
    """The first `most` names and the count of the others."""
    text = ", ".join(names[:most])
    return text if len(names) <= most else f"{text} and {len(names) - most} more"


def _find_index(path: Path) -> Path | None:
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory; a checkpoint is a directory of .safetensors files")
    indices = sorted(path.glob("*.safetensors.index.json"))
    if len(indices) > 1:
        names = shorten([file.name for file in indices])
        raise CheckpointError(f"{path} holds {len(indices)} indices ({names}); keep one")
    return indices[0] if indices else None


def _only_file(path: Path) -> Path:
    files = sorted(path.glob("*.safetensors"))
    if not files:
        kinds = (".bin", ".pt", ".pth", ".gguf")
        others = sorted(file.name for file in path.iterdir() if file.suffix in kinds)
        hint = f" (it holds {shorten(others)}, and nextn reads safetensors only)" if others else ""
        raise CheckpointError(f"{path} holds no .safetensors file{hint}")
    if len(files) > 1:
        raise CheckpointError(
            f"{path} holds {len(files)} .safetensors files ({shorten([file.name for file in files])}) "
            f"and no {INDEX_NAME} that says which tensor lies where"
        )
    return files[0]


def _read_index(file: Path) -> dict[str, str]:
    try:
        index = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None
    table = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(table, dict) or not all(isinstance(value, str) for value in table.values()):
        raise CheckpointError(f"{file} lacks a weight_map from tensor names to file names")
    outside = sorted({value for value in table.values() if Path(value).name != value})
    if outside:
        raise CheckpointError(f"{file} names files outside its own directory: {shorten(outside)}")
    return table


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Read and check the header of one safetensors file.

    Raises `CheckpointError` naming the file unless the header is JSON of the stated length whose tensors,
    end to end, cover the file to its last byte.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(_MAX_HEADER_BYTES, size - 8):
                raise CheckpointError(f"{file} is truncated or not a safetensors file ({size} bytes)")
            table = json.loads(stream.read(length))
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None
    except ValueError as error:
        raise CheckpointError(f"{file} has a corrupt header: {error}") from None
    try:
        table.pop("__metadata__", None)
        tensors = [_stored(file, name, entry, 8 + length) for name, entry in table.items()]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file} has a corrupt header: {error!r}") from None
    expected = 8 + length
    for tensor in sorted(tensors, key=lambda tensor: (tensor.begin, tensor.end)):
        if tensor.begin != expected:
            raise CheckpointError(f"{file} has a corrupt header: a gap or an overlap before {tensor.name}")
        expected = tensor.end
    if expected != size:
        raise CheckpointError(f"{file} is truncated or damaged: it has {size} bytes instead of {expected}")
    return {tensor.name: tensor for tensor in tensors}


def _stored(file: Path, name: str, entry: Mapping[str, Any], base: int) -> StoredTensor:
    begin, end = entry["data_offsets"]
    shape = tuple(int(size) for size in entry["shape"])
    if entry["dtype"] not in _ITEM_BYTES:
        raise ValueError(f"{name} has dtype {entry['dtype']}")
    if min(shape, default=0) < 0 or end - begin != math.prod(shape) * _ITEM_BYTES[entry["dtype"]]:
        raise ValueError(f"{name} has {end - begin} bytes for {entry['dtype']} {list(shape)}")
    return StoredTensor(name, entry["dtype"], shape, file, base + begin, base + end)


def copy_tensors(
    file: Path, tensors: Mapping[str, StoredTensor], advance: Callable[[int], None] = lambda nbytes: None
) -> None:
    """Write `file` with the given tensors under their new names, their bytes unchanged, in constant memory.

    advance: called with the number of bytes after each piece.
    """
    # The widest items come first, so that every tensor stays aligned to its own item size.
    order = sorted(tensors, key=lambda name: (-_ITEM_BYTES[tensors[name].dtype], name))
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in order:
        tensor = tensors[name]
        end = offset + tensor.nbytes
        table[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with file.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        for name in order:
            for piece in tensors[name].chunks():
                stream.write(piece)
                advance(len(piece))


def write_json(file: Path, value: object) -> None:
    """Write `value` with sorted keys and an indent of 2."""
    file.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def write_index(directory: Path, files: Mapping[str, str], total_size: int) -> None:
    """Write the index: `files` maps tensor names to file names, `total_size` is their sum in bytes."""
    write_json(directory / INDEX_NAME, {"metadata": {"total_size": total_size}, "weight_map": dict(files)})
