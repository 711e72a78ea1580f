"""A tokenizer of characters."""

import pytest

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<answer>", "</answer>"]


@pytest.fixture(scope="session")
def tokenizer_of():
    """(chat template, bos, eos) → a tokenizer with one token a character, its code point; it adds BOS and EOS if told."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")

    def made(chat_template=None, *, bos=False, eos=False):
        vocabulary = {text: number for number, text in enumerate([*map(chr, range(128)), *SPECIAL])}
        characters = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
        characters.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
        characters.decoder = tokenizers.decoders.Fuse()
        characters.add_special_tokens(SPECIAL)
        characters.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{'<s> ' if bos else ''}$A{' </s>' if eos else ''}", special_tokens=[("<s>", 128), ("</s>", 129)]
        )
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=characters, bos_token="<s>", eos_token="</s>", extra_special_tokens=SPECIAL[2:]
        )
        tokenizer.chat_template = chat_template
        return tokenizer

    return made
