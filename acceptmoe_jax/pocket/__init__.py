"""Tasks, text and tokenizer of the pocket checkpoints: everything their training reads, from seeds.

`families` draws the four task families, `drills` the arithmetic they rest on, `real_text` adds
natural text, `chat` writes tasks as chats, `tokenizer` is the byte-level BPE, `corpus` packs all of
it into rows for training, and `scoring` judges completions.
"""
