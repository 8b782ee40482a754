"""Chats and tool traces: messages, their released text format, and their tokens."""
