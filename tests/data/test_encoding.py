"""One prompt as token ids, and one completion as text."""

import pytest

from rollalloc.data.encoding import check_template_arguments, completion_text, encode_each, encode_prompt

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)
# Refuses system messages, as Gemma's template does.
NO_SYSTEM = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] | trim }}{% endfor %}"
)
USER = {"role": "user", "content": "hi"}


def written(tokenizer, prompt, **options):
    """What the model reads, as text."""
    return tokenizer.decode(encode_prompt(tokenizer, prompt, **options), skip_special_tokens=False)


def test_text_begins_with_one_bos_and_does_not_end_with_eos(tokenizer_of):
    tokenizer = tokenizer_of(bos=True, eos=True)
    assert written(tokenizer, "hi") == "<s>hi"
    assert written(tokenizer, "<s><|im_start|>user\nhi<|im_end|>\n") == "<s><|im_start|>user\nhi<|im_end|>\n"
    assert written(tokenizer, "<s>") == "<s>"
    assert written(tokenizer, "hi</s>") == "<s>hi</s>"  # the user wrote this one
    assert written(tokenizer_of(), "hi") == "hi"


class Counted:
    """A tokenizer that counts its calls; `singly`: it refuses several texts at once."""

    def __init__(self, tokenizer, singly=False):
        self.tokenizer, self.singly, self.calls = tokenizer, singly, 0
        self.chat_template, self.is_fast = tokenizer.chat_template, tokenizer.is_fast
        self.num_special_tokens_to_add = tokenizer.num_special_tokens_to_add

    def __call__(self, text, **how):
        self.calls += 1
        if self.singly and not isinstance(text, str):
            raise TypeError("one text")
        return self.tokenizer(text, **how)


@pytest.mark.parametrize("singly", [False, True])
@pytest.mark.parametrize(("bos", "eos"), [(True, True), (False, True), (False, False)])
def test_many_texts_are_encoded_as_each_alone_is(tokenizer_of, bos, eos, singly):
    texts, tokenizer = ["hi", "<s>hi", "a longer one", "hi</s>", "<s>"], tokenizer_of(bos=bos, eos=eos)
    counted = Counted(tokenizer, singly)
    assert encode_each(counted, texts, str) == [encode_prompt(tokenizer, text) for text in texts]
    assert singly or counted.calls == (2 if bos or eos else 1)


def test_of_many_texts_the_one_that_cannot_be_encoded_is_named(tokenizer_of):
    with pytest.raises(ValueError, match=r"^row 1 has no tokens"):
        encode_each(tokenizer_of(), ["hi", "", "hi"], "row {}".format)


def test_many_chats_are_encoded_as_each_alone_is(tokenizer_of, monkeypatch):
    tokenizer, rendered = tokenizer_of(CHATML, bos=True), list[int]()
    chats = [[USER], "a text", [USER, {"role": "assistant", "content": "I th"}], [{**USER, "content": "<s> é"}], [USER]]
    options = {"arguments": {"enable_thinking": False}}
    alone = [encode_prompt(tokenizer, chat, **options) for chat in chats]
    whole = tokenizer.apply_chat_template
    monkeypatch.setattr(
        tokenizer, "apply_chat_template", lambda chat, **how: rendered.append(len(chat)) or whole(chat, **how)
    )
    assert encode_each(tokenizer, chats, str, **options) == alone
    assert rendered == [3, 1]  # three chats to answer in one call, and one to continue
    monkeypatch.setattr("rollalloc.data.encoding._TOGETHER", 2)
    assert encode_each(tokenizer, chats, str, **options) == alone
    assert rendered[2:] == [2, 1, 1]


def test_of_many_chats_the_first_that_cannot_be_rendered_is_named_and_the_others_need_not_be(tokenizer_of):
    refused, tokenizer = [{"role": "system", "content": "s"}, USER], tokenizer_of(NO_SYSTEM)
    with pytest.raises(ValueError, match=r"^row 1 begins with a system message"):
        encode_each(tokenizer, [[USER], refused, "", refused], "row {}".format)
    called = [USER, {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}]
    with pytest.raises(ValueError, match=r"^row 0 ends with a tool call"):
        encode_each(tokenizer_of(CHATML), [called, [USER, {"role": "assistant", "content": "a"}]], "row {}".format)
    with pytest.raises(
        ValueError, match=r"^row 1 has messages \(system, user\) and the tokenizer has no chat template"
    ):
        encode_each(tokenizer_of(), [[USER], refused], "row {}".format)


def test_messages_are_rendered_with_the_generation_prompt(tokenizer_of):
    tokenizer = tokenizer_of(CHATML, bos=True, eos=True)
    assert written(tokenizer, [USER]) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("begun", ["Let me think.\n<think>", "<think>\n", ""])
def test_an_assistants_last_message_is_continued(tokenizer_of, begun):
    messages = [USER, {"role": "assistant", "content": begun}]
    expected = f"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n{begun}"
    assert written(tokenizer_of(CHATML), messages) == expected
    assert messages[-1]["content"] == begun


def test_the_template_gets_its_arguments(tokenizer_of):
    tokenizer = tokenizer_of(CHATML)
    assert written(tokenizer, [USER], arguments={"enable_thinking": False}).endswith("assistant\n<think></think>")
    assert written(tokenizer, [USER], arguments={"enable_thinking": True}).endswith("assistant\n")


def test_tools_reach_the_template(tokenizer_of):
    template = "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}{{ messages[-1].content }}"
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    chat = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "2"},
    ]
    assert written(tokenizer_of(template), chat, arguments={"tools": [tool]}) == "[add]2"
    with pytest.raises(ValueError, match=r"p ends with a tool call of the assistant.*add the tool's answer"):
        encode_prompt(tokenizer_of(template), chat[:2], name="p")


def test_a_template_that_refuses_system_messages_is_said_with_the_remedy(tokenizer_of):
    chat = [{"role": "system", "content": ""}, USER]
    with pytest.raises(ValueError, match=r"p begins with a system message, ''.*not supported.*--no-system"):
        encode_prompt(tokenizer_of(NO_SYSTEM), chat, name="p")
    assert written(tokenizer_of(NO_SYSTEM), [USER]) == "<s><user>hi"


def test_a_template_that_takes_no_parts_is_said_with_the_remedy(tokenizer_of):
    chat = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    with pytest.raises(
        ValueError,
        match="if the chat template takes no lists of parts, give each message's content as text; otherwise remove",
    ):
        encode_prompt(tokenizer_of("{{ 'user: ' + messages[0].content }}"), chat)


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{% for %}", "{{ messages[9].content.strip() }}"])
def test_a_template_that_fails_otherwise_names_the_prompt(tokenizer_of, template):
    with pytest.raises(ValueError, match="prompt 'a/1' cannot be tokenized"):
        encode_prompt(tokenizer_of(template), [{"role": "system", "content": "s"}, USER], name="prompt 'a/1'")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([1], "must be a JSON object"),
        ({1: 2}, "must be a JSON object"),
        ({"tokenize": False}, "must not set tokenize"),
        ({"chat_template": "x"}, "store the template in the tokenizer"),
    ],
)
def test_arguments_that_a_template_cannot_be_given_are_refused(arguments, says):
    with pytest.raises(ValueError, match=says):
        check_template_arguments(arguments)


def test_a_completion_keeps_special_tokens_but_those_that_end_it(tokenizer_of):
    tokenizer = tokenizer_of()
    ids = tokenizer("<think>1</think><answer>2</answer><|im_end|></s>", add_special_tokens=False)["input_ids"]
    ending = tokenizer.convert_tokens_to_ids(["<|im_end|>", "</s>"])
    assert completion_text(tokenizer, ids, ending) == "<think>1</think><answer>2</answer>"
    assert completion_text(tokenizer, [], ending) == ""
