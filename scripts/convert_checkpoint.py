#!/usr/bin/env python3
"""Converts a checkpoint between block FP8 and bf16; the same as the command `nextn-convert`."""

import sys

from nextn.models.convert import main

if __name__ == "__main__":
    sys.exit(main())
