"""Offline: raw text -> tokenizer, packed rows and metadata in one folder."""
