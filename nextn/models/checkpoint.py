"""Directories of safetensors files: which tensor lies where, and writing new ones byte for byte.

Headers are read and checked here, down to the file's last byte. Where there is an index, only files that
somebody asks about are opened, so that a directory which holds a part of a large checkpoint's shards serves
whoever needs that part; without one, the headers of all files are the index.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, KeysView, Mapping, Sequence
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
_SHARD_NAME = re.compile(r"-(\d+)-of-(\d+)\.safetensors$")
_LFS_POINTER = b"version https://git-lfs"

Stamp = tuple[int, int, int]
"""Size of a file in bytes, and when its data and its entry changed last, in nanoseconds."""


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

    def chunks(self, room: memoryview) -> Iterator[memoryview]:
        """The tensor's bytes in order, in pieces that lie in `room` by turns; raises `CheckpointError`."""
        try:
            with self.file.open("rb") as stream:
                stream.seek(self.begin)
                left = self.nbytes
                while left:
                    piece = room[: min(left, len(room))]
                    if stream.readinto(piece) < len(piece):
                        raise CheckpointError(f"{self.file} ended inside {self.name}; the file is truncated")
                    left -= len(piece)
                    yield piece
        except OSError as error:
            raise CheckpointError(f"{self.file} cannot be read at {self.name}: {error}") from None


class Checkpoint:
    """The tensors of one directory: an index and the shards that it names, or all .safetensors files there.

    Raises `CheckpointError` where there are none, where some of a numbered set are absent and no index says
    that they are not needed, or where two files hold the same tensor and no index says which one counts.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stamps: dict[Path, Stamp] = {}
        """What each file that was read, index or shard, was like just before that."""
        self._headers: dict[Path, dict[str, StoredTensor]] = {}
        index = _find_index(path)
        if index is not None:
            self.source = index
            self.stamps[index] = stamp_of(index)
            self._files = {name: path / file for name, file in _read_index(index).items()}
        else:
            files = _all_files(path)
            self.source = files[0] if len(files) == 1 else path
            self._files = self._index_of(files)

    def _index_of(self, files: Sequence[Path]) -> dict[str, Path]:
        """Which file holds which tensor, from the headers of all."""
        table: dict[str, Path] = {}
        twice: list[str] = []
        for file in files:
            header = self.header(file)
            twice += [f"{name} ({table[name].name} and {file.name})" for name in header if name in table]
            table |= dict.fromkeys(header, file)
        if twice:
            raise CheckpointError(
                f"{self.path} has no index, and tensors are stored twice ({len(twice)}): {shorten(twice)}; "
                "keep one copy"
            )
        return table

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
        missing = [
            file.name for file in files if not os.path.isfile(file)
        ]  # whatever keeps it from being one
        if missing:
            raise CheckpointError(f"{self.source} names files that do not exist: {shorten(missing)}")
        return files

    def header(self, file: Path) -> Mapping[str, StoredTensor]:
        """All tensors that `file` itself holds, whatever the index says; read once."""
        if file not in self._headers:
            self.stamps[file] = stamp_of(file)
            self._headers[file] = read_header(file)
        return self._headers[file]

    def find(self, name: str) -> StoredTensor | None:
        """Where `name` lies, or None if its file does not hold it although the index says so."""
        return self.header(self._files[name]).get(name)


def stamp_of(file: Path) -> Stamp:
    """What tells that a file was written anew, even where its mtime was set back (cp -p, rsync -t)."""
    try:
        state = file.stat()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None
    return state.st_size, state.st_mtime_ns, state.st_ctime_ns


def require_unchanged(stamps: Mapping[Path, Stamp]) -> None:
    """Raise `CheckpointError` if a file is no longer what it was before it was read."""
    changed = [str(file) for file in sorted(stamps) if stamp_of(file) != stamps[file]]
    if changed:
        raise CheckpointError(f"files changed while they were read: {shorten(changed)}; run it again")


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


def _all_files(path: Path) -> list[Path]:
    """The .safetensors files of a directory without an index; a numbered set must be whole."""
    files = sorted(path.glob("*.safetensors"))
    if not files:
        kinds = (".bin", ".pt", ".pth", ".gguf")
        others = sorted(file.name for file in path.iterdir() if file.suffix in kinds)
        hint = f" (it holds {shorten(others)}, and nextn reads safetensors only)" if others else ""
        raise CheckpointError(f"{path} holds no .safetensors file{hint}")
    numbered = [match for file in files if (match := _SHARD_NAME.search(file.name))]
    if numbered:
        total = int(numbered[0][2])
        absent = total - len({int(match[1]) for match in numbered})
        if absent > 0:
            raise CheckpointError(
                f"{path} lacks {absent} of {total} shards and has no {INDEX_NAME} that says which tensor "
                "lies where; fetch the index, or all shards"
            )
    return files


def _read_index(file: Path) -> dict[str, str]:
    try:
        index = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None
    table = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(table, dict) or not all(isinstance(value, str) for value in table.values()):
        raise CheckpointError(f"{file} lacks a weight_map from tensor names to file names")
    outside = sorted({value for value in table.values() if Path(value).name != value})
    if outside:
        raise CheckpointError(f"{file} names files outside its own directory: {shorten(outside)}")
    return table


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose names differ; `json` itself would keep the last of two."""
    table = dict(pairs)
    if len(table) != len(pairs):
        twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
        raise ValueError(f"names that stand twice: {shorten(twice)}")
    return table


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Read and check the header of one safetensors file.

    Raises `CheckpointError` naming the file unless the header is JSON of the stated length whose tensors,
    end to end, cover the file to its last byte.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            length = int.from_bytes(start, "little")
            if size < 8 or length > min(_MAX_HEADER_BYTES, size - 8):
                raise CheckpointError(_no_safetensors(file, size, start + stream.read(len(_LFS_POINTER))))
            table = json.loads(stream.read(length), object_pairs_hook=_unique)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:
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


def _no_safetensors(file: Path, size: int, start: bytes) -> str:
    """What to say about a file whose first bytes give no length of a header in it."""
    if start.startswith(_LFS_POINTER):
        return f"{file} is a Git LFS pointer and not the file itself; run `git lfs pull` in {file.parent}"
    return f"{file} is truncated or not a safetensors file ({size} bytes)"


def _stored(file: Path, name: str, entry: Mapping[str, Any], base: int) -> StoredTensor:
    (begin, end), shape, dtype = entry["data_offsets"], tuple(entry["shape"]), entry["dtype"]
    if not all(type(number) is int and number >= 0 for number in (begin, end, *shape)):
        raise ValueError(f"{name} has shape {list(shape)} at {begin} to {end}")
    if dtype not in _ITEM_BYTES:
        raise ValueError(f"{name} has dtype {dtype}")
    if end - begin != math.prod(shape) * _ITEM_BYTES[dtype]:
        raise ValueError(f"{name} has {end - begin} bytes for {dtype} {list(shape)}")
    return StoredTensor(name, dtype, shape, file, base + begin, base + end)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where tensors lie in a file: the header's bytes, and each tensor's [begin, end) in the file."""

    header: bytes
    places: Mapping[str, tuple[int, int]]

    @property
    def nbytes(self) -> int:
        """Size of the whole file."""
        return max((end for _, end in self.places.values()), default=len(self.header))


def lay_out(tensors: Mapping[str, tuple[str, Sequence[int]]]) -> Layout:
    """The layout of a safetensors file with these dtype codes and shapes by name.

    The widest items come first, so that every tensor stays aligned to its own item size.
    """
    order = sorted(tensors, key=lambda name: (-_ITEM_BYTES[tensors[name][0]], name))
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, tuple[int, int]] = {}
    offset = 0
    for name in order:
        dtype, shape = tensors[name]
        offsets[name] = (offset, offset + tensor_nbytes(dtype, shape))
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets[name])}
        offset = offsets[name][1]
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    header = len(header).to_bytes(8, "little") + header
    base = len(header)
    return Layout(header, {name: (base + begin, base + end) for name, (begin, end) in offsets.items()})


def tensor_nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor with this dtype code and shape."""
    return math.prod(shape) * _ITEM_BYTES[dtype]


def read_config(file: Path) -> dict[str, Any]:
    """The JSON object in `file`, which may be a config.json or a directory that holds one."""
    try:
        path = file / "config.json" if file.is_dir() else file
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return config


def write_json(file: Path, value: object) -> None:
    """Write `value` with sorted keys and an indent of 2; what UTF-8 lacks (half a surrogate) is escaped."""
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    file.write_bytes(text.encode(errors="backslashreplace"))


def write_index(directory: Path, files: Mapping[str, str], total_size: int) -> None:
    """Write the index: `files` maps tensor names to file names, `total_size` is their sum in bytes."""
    write_json(directory / INDEX_NAME, {"metadata": {"total_size": total_size}, "weight_map": dict(files)})
