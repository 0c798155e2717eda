"""Text in and out: tokenizers with their chat templates, and where a generation ends."""
