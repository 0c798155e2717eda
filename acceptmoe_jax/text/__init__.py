"""Text in and out: tokenizers with their chat templates, and where a generation ends.

`harmony` parts the answers of GPT-OSS into reasoning and final text.
"""
