"""The small models: exact tokenizers, weights from the seed, loadable again from what they save."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from smopd.worlds import toy_tools, toy_world
from smopd.worlds.models import QWEN_VOCAB_SIZE, qwen_tokenizer, qwen_vocab_model, world_model

QWEN_TEXTS = (
    "Hello, world! 1234 it's",
    "  leading and trailing  \n\n\ttabs\r\n",
    "Grüße, 世界, مرحبا, 👩‍🚀",
    '<think> a </think>\n<tool_call>\n{"name": "f", "parameters": {"x": [1, -2.5e3, null]}}\n</tool_call>',
)


def user(text):
    return [{"role": "user", "content": text}]


def chat_ids(tokenizer, messages):
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


@pytest.fixture(scope="module")
def world():
    return world_model(0)


@pytest.fixture(scope="module")
def rows():
    return toy_world.demonstrations(1000, seed=2, format_rate=0.1)


@pytest.fixture(scope="module")
def reloaded(world, tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    model, tokenizer = world
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def qwen_pair(data_set):
    ranks_file = data_set("tokenizer/qwen")
    return qwen_vocab_model(0, ranks_file, hidden_size=32, layers=1, heads=1)


@pytest.fixture(scope="module")
def qwen(qwen_pair):
    return qwen_pair[1]


def test_completions_are_decoded_exactly(world, rows):
    _, tokenizer = world
    texts = [row["completion"] for row in rows] + [row["ground_truth"] for row in rows]
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    assert tokenizer.batch_decode(ids, skip_special_tokens=True) == texts
    assert [tokenizer.decode([*sequence, tokenizer.eos_token_id], skip_special_tokens=True)
            for sequence in ids[:100]] == texts[:100]  # fmt: skip


def test_a_value_is_one_token_in_the_prompt_and_in_the_call(world):
    _, tokenizer = world
    for value in (value for pool in toy_tools.POOLS.values() for value in pool):
        asked = tokenizer(f"set {value} for")["input_ids"]
        quoted = tokenizer(f'": "{value}"}}}}')["input_ids"]
        assert len(asked) == len(quoted) == 3
        assert asked[1] == quoted[1]


def test_chat_template(world):
    _, tokenizer = world
    tokens = tokenizer.convert_ids_to_tokens(chat_ids(tokenizer, user("call anna please")))
    assert tokens == ["<|user|>", "call", "anna", "please", "<|assistant|>"]
    messages = [{"role": "system", "content": "play"}, *user("call"), {"role": "assistant", "content": "I"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == "<|system|>play<|user|>call<|assistant|>I<eos>"


def test_special_tokens_and_vocabulary_fit_the_model(world):
    model, tokenizer = world
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    assert (tokenizer.pad_token, tokenizer.bos_token, tokenizer.eos_token) == ("<pad>", "<bos>", "<eos>")
    assert model.config.vocab_size == len(tokenizer) == len(toy_world.vocabulary()) + 7
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))


def test_world_model_loads_again(world, reloaded, rows):
    model, tokenizer = world
    model_again, tokenizer_again = reloaded
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, model_again.state_dict()[name]), name
    assert model_again.dtype == torch.float32
    for row in rows[:300]:
        ids = tokenizer(row["completion"])["input_ids"]
        assert tokenizer_again(row["completion"])["input_ids"] == ids
        assert tokenizer_again.decode(ids) == row["completion"]
        assert chat_ids(tokenizer_again, user(row["prompt"])) == chat_ids(tokenizer, user(row["prompt"]))
    assert tokenizer_again.eos_token_id == tokenizer.eos_token_id
    assert tokenizer_again.pad_token_id == tokenizer.pad_token_id


def test_weights_come_from_the_seed_and_leave_the_global_state_alone(world):
    before = torch.get_rng_state()
    same, other = world_model(0)[0], world_model(1)[0]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(same.lm_head.weight, world[0].lm_head.weight)
    assert not torch.equal(other.lm_head.weight, world[0].lm_head.weight)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"hidden_size": 48, "heads": 2},
            "hidden_size is 48, expected a multiple of heads = 2 of at least 64",
        ),
        ({"hidden_size": 100, "heads": 3}, "hidden_size is 100, expected a multiple of heads = 3"),
        ({"layers": 0}, "layers is 0, expected at least 1"),
        ({"intermediate_size": 0}, "intermediate_size is 0, expected at least 1"),
        ({"kv_heads": 3}, "kv_heads is 3, expected a divisor of heads = 2"),
        ({"kv_heads": 0}, "kv_heads is 0, expected a divisor of heads = 2"),
        ({"vocab_size": 9}, "vocab_size is 9, expected at least the tokenizer's"),
    ],
)
def test_sizes_that_do_not_fit_are_named(sizes, message):
    with pytest.raises(ValueError, match=message):
        world_model(0, **sizes)


def test_rows_beyond_the_tokenizer_decode_to_nothing():
    model, tokenizer = world_model(0, kv_heads=1, vocab_size=700)
    assert model.lm_head.weight.shape[0] == 700 > len(tokenizer)
    assert model.model.layers[0].self_attn.k_proj.weight.shape[0] == 32
    ids = tokenizer("<think>")["input_ids"]
    assert tokenizer.decode([699, *ids, len(tokenizer)]) == "<think>"


def test_qwen_ids(qwen):
    assert len(qwen) == 151_646
    assert qwen.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [
        151643,
        151644,
        151645,
    ]
    assert (qwen.eos_token_id, qwen.pad_token_id) == (151645, 151643)
    assert qwen("Hello world 12")["input_ids"] == [9707, 1879, 220, 16, 17]


def test_qwen_chat_template_is_chatml(qwen):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    text = qwen.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"


def test_qwen_vocab_model_loads_again(qwen_pair, tmp_path):
    model, tokenizer = qwen_pair
    assert model.lm_head.weight.shape == (QWEN_VOCAB_SIZE, 32)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.eos_token == "<|im_end|>" and again.pad_token == "<|endoftext|>"
    for text in QWEN_TEXTS:
        assert again(text)["input_ids"] == tokenizer(text)["input_ids"]
        assert chat_ids(again, user(text)) == chat_ids(tokenizer, user(text))
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path).lm_head.weight, model.lm_head.weight)


def test_ranks_file_must_exist_and_be_one(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer_file .* is no file"):
        qwen_tokenizer(tmp_path / "absent.tiktoken")
    broken = tmp_path / "broken.tiktoken"
    broken.write_text("IQ== 0\nnot a rank line\n")
    with pytest.raises(
        ValueError, match="line 2 is b'not a rank line', expected a base64 token and its rank"
    ):
        qwen_tokenizer(broken)
