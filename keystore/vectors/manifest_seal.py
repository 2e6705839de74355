#!/usr/bin/env python3
"""Writes manifest.seal, from its description in src/manifest_seal.rs, by nothing but Python's
standard library: python3 manifest_seal.py > manifest.seal"""
import hashlib
import hmac
import struct

from audit import derive

keystore, version = b"0123456789abcdef", 3
manifest = b'{"Files": []}\n'
key = derive(bytes([7]) * 32, b"pagevault backup manifest v1", keystore + struct.pack("<I", version))
sha256 = lambda content: hashlib.sha256(content).digest()
others = [b"port = 5433\n", b"", None, None, None, None]
items = b"".join(b"\0" if content is None else b"\1" + sha256(content) for content in others)
body = (
    f'{{"version":1,"keystore":"{keystore.hex()}","time":"2023-11-14T22:13:20.123456Z",'
    f'"sha256":"{sha256(manifest).hex()}","others":"{sha256(items).hex()}","mac_key":{version}'
)
print(f'{body},"mac":"{hmac.new(key, body.encode(), hashlib.sha256).hexdigest()}"}}')
