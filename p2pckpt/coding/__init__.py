"""Bytes in, bytes out: Reed-Solomon and CRC32C, one library each."""
