"""The paged key/value cache: `pages` is the storage, `prefix` tracks which request or prefix holds each page."""
