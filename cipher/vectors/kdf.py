#!/usr/bin/env python3
"""Prints the derived key that the test in cipher/src/kdf.rs expects. Not part of the build."""

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

label, context = b"temporary file", b"base/pgsql_tmp/pgsql_tmp1.0"
info = b"".join(len(part).to_bytes(8, "little") + part for part in (label, context))
print(HKDF(hashes.SHA256(), 64, None, info).derive(b"\x0b" * 32).hex())
