"""Preference models as rewards: what they score, and errors. At a URL: tests/engine/remote."""

import pytest
import torch

from smopd.engine.models.loading import UnusableModel
from smopd.rewards.preference_model import preference_reward
from tests.smopd.rewards.tiny_preference import PLAIN_TEMPLATE, byte_tokenizer, config, save

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "Name a colour of the rainbow, please"},
]
PROMPTS = ["How are you?", tuple(CHAT), "x", "How are you?", CHAT[:2], "Long " * 30]
COMPLETIONS = ["Fine.", "Blue, or any other", "", "Fine.", "Good day", "yes"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of a preference model, and the model."""
    folder = tmp_path_factory.mktemp("preference")
    return str(folder), save(folder, byte_tokenizer())


def reward(folder, prompts=PROMPTS, completions=COMPLETIONS, **settings):
    return preference_reward(prompts, completions, model=folder, **{"max_tokens": 512, **settings})


def ids_of(prompt, completion, tokenizer):
    chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    chat.append({"role": "assistant", "content": completion})
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@torch.no_grad()
def truth(network, ids):
    """The head at the last position of one unpadded row."""
    states = network.model(input_ids=torch.tensor([list(ids)])).last_hidden_state
    return float(network.score(states[0, -1]))


def test_the_head_at_the_last_token_whatever_the_batch(model):
    folder, network = model
    pairs = zip(PROMPTS, COMPLETIONS, strict=True)
    expected = [truth(network, ids_of(*pair, byte_tokenizer())) for pair in pairs]
    assert len(set(expected)) == 5 and max(expected) - min(expected) > 0.1
    together = reward(folder)
    assert together == pytest.approx(expected, abs=1e-5)
    assert reward(folder, batch_tokens=100) == pytest.approx(expected, abs=1e-5)
    assert reward(folder, PROMPTS[::-1], COMPLETIONS[::-1]) == pytest.approx(expected[::-1], abs=1e-5)
    assert together[0] == together[3], "equal chats have exactly equal scores"
    assert reward(folder, sign=-1) == [-value for value in together]
    assert reward(folder, [], []) == []


def test_templates_and_truncation(model, tmp_path, caplog):
    folder, network = model
    file = tmp_path / "plain.jinja"
    file.write_text(PLAIN_TEMPLATE)
    plain = byte_tokenizer(template=PLAIN_TEMPLATE)
    ids = [ids_of(prompt, text, plain) for prompt, text in zip(PROMPTS, COMPLETIONS, strict=True)]
    expected = [truth(network, each) for each in ids]
    assert reward(folder, template=str(file)) == pytest.approx(expected, abs=1e-5)
    for side, which, kept in (("left", "last", slice(-20, None)), ("right", "first", slice(20))):
        cut = [truth(network, each[kept]) for each in ids]
        found = reward(folder, template=PLAIN_TEMPLATE, max_tokens=20, truncation_side=side)
        assert found == pytest.approx(cut, abs=1e-5) and cut != pytest.approx(expected, abs=1e-3)
        assert f"5 chats are cut to the {which} 20 tokens" in caplog.text
    refusal = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    values = reward(folder, template=refusal + PLAIN_TEMPLATE)
    assert values[1] is values[4] is None
    assert [values[i] for i in (0, 2, 3, 5)] == pytest.approx([expected[i] for i in (0, 2, 3, 5)], abs=1e-5)
    assert "refuses 2 of 6 chats: no system" in caplog.text
    with pytest.raises(ValueError, match="refuses every chat: no system"):
        reward(folder, PROMPTS[1:2], COMPLETIONS[1:2], template=refusal + PLAIN_TEMPLATE)
    assert reward(folder, ["a", "b"], ["", "c"], template="{{ messages[1]['content'] }}")[0] is None


@pytest.mark.parametrize("template", [None, PLAIN_TEMPLATE])
def test_content_in_parts_is_scored_as_its_text(model, template):
    parts = [{"type": "text", "text": text} for text in ("How are", "you?")]
    prompts = [[{"role": "user", "content": content}] for content in (parts, tuple(parts), "How are\nyou?")]
    assert len(set(reward(model[0], prompts, ["Fine."] * 3, template=template))) == 1


def test_the_model_is_loaded_once(model, tmp_path):
    save(tmp_path, byte_tokenizer(), seed=3)
    first = reward(str(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    assert reward(str(tmp_path), template=PLAIN_TEMPLATE) != first == reward(str(tmp_path))
    assert reward(model[0]) != pytest.approx(first, abs=0.01), "another model is another reward"


def test_what_is_no_preference_model_is_one_line(model, tmp_path):
    from transformers import BertConfig, BertForSequenceClassification, Qwen2ForCausalLM

    def mistake(kind, match, folder):
        with pytest.raises(kind, match=match) as caught:
            reward(str(folder))
        assert "\n" not in str(caught.value)

    save(tmp_path / "two", byte_tokenizer(), labels=2)
    mistake(UnusableModel, r"one output: score.weight has shape \(2, 64\), expected \(1", tmp_path / "two")
    causal = tmp_path / "causal"
    Qwen2ForCausalLM(config(byte_tokenizer())).save_pretrained(causal)
    byte_tokenizer().save_pretrained(causal)
    mistake(UnusableModel, "not a .* trained with one output: its files lack score.weight", causal)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    bert = BertForSequenceClassification(BertConfig(vocab_size=300, num_labels=1, **sizes))
    bert.save_pretrained(tmp_path / "bert")
    mistake(UnusableModel, "no linear head `score` over single tokens", tmp_path / "bert")
    mistake(FileNotFoundError, "no such folder", tmp_path / "absent")
    save(tmp_path / "bare", byte_tokenizer(template=None))
    mistake(ValueError, "has no chat template; expected one as `template`", tmp_path / "bare")


def test_a_wrong_argument_is_named(model):
    for settings, message in (
        ({"max_tokens": 0}, "max_tokens\n  Input should be greater than 0"),
        ({"max_tokens": 2048}, "max_tokens is 2048, expected at most 512"),
        ({"template": "no_such.jinja"}, "template no_such.jinja: no such file"),
        ({"prompts": [None] * 6}, r"prompts\[0\] is 'None', expected a text or chat messages"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            reward(model[0], **settings)
