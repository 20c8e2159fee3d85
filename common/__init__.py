"""Helpers that several packages share: files, state files, validation, tasks, gRPC, HTTP serving. Imports api only."""
