#!/usr/bin/env python3
"""Writes the NextN layer of a checkpoint as a draft checkpoint; the same as the command `nextn-export`."""

import sys

from nextn.models.export import main

if __name__ == "__main__":
    sys.exit(main())
