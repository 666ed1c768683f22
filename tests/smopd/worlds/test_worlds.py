"""The quickstart's world and the small models: draws, splits and scores; tokenizers, weights, reloading."""

import hashlib
import json

import torch
from transformers import AutoTokenizer

from smopd.config.cli import read_settings
from smopd.rewards.rlla import accuracy_reward, format_reward
from smopd.worlds import toy_world
from smopd.worlds.models import world_model, world_tokenizer
from tests.smopd.recipes import ROOT, save_world

DIGESTS = ["87a2a9b7b54d622f", "b9c3532cad9f0845", "18701403d2b76143"]


def test_the_draws_are_those_of_the_published_runs():
    rows = [toy_world.prompts(500, 7), toy_world.demonstrations(500, 3), toy_world.vocabulary()]
    digests = [hashlib.sha256(json.dumps(each).encode()).hexdigest()[:16] for each in rows]
    assert digests == DIGESTS
    assert toy_world.prompts(20, 7) == rows[0][:20] != toy_world.prompts(20, 8)


def test_held_out_requests_are_in_no_training_prompt():
    def requests(rows):
        return {row["prompt"].split("\n")[1] for row in rows}

    held_out = requests(toy_world.prompts(2000, seed=0, split="heldout"))
    train = requests(toy_world.prompts(5000, seed=0)) | requests(toy_world.demonstrations(5000, seed=0))
    assert len(held_out) > 200 and held_out.isdisjoint(train)


def test_ground_truths_score_full_marks():
    rows = toy_world.prompts(500, seed=1) + toy_world.prompts(500, seed=1, split="heldout")
    truths = [row["ground_truth"] for row in rows]
    assert accuracy_reward(truths, truths, ground_truth=truths) == [3.0] * 1000
    assert format_reward(truths, truths, ground_truth=truths) == [1.0] * 1000


def test_the_recipe_of_the_benchmark_makes_its_model():
    with torch.device("meta"):
        model, tokenizer = world_model(0, **read_settings(f"{ROOT}/bench/training_step.yaml").model.kwargs)
    assert len(model.lm_head.weight) == 151_936 > len(tokenizer)
    assert model.num_parameters() == 494_032_768  # Qwen2.5-0.5B's


def test_texts_of_the_world_are_decoded_exactly_also_by_what_is_saved(tmp_path):
    save_world(tmp_path)
    tokenizers = (world_tokenizer(toy_world.vocabulary()), AutoTokenizer.from_pretrained(tmp_path))
    rows = toy_world.demonstrations(1000, seed=2, format_rate=0.1)
    texts = [row["completion"] for row in rows] + [row["ground_truth"] for row in rows]
    first, again = ([[*ids, used.eos_token_id] for ids in used(texts)["input_ids"]] for used in tokenizers)
    assert first == again
    assert tokenizers[1].batch_decode(first, skip_special_tokens=True) == texts
    for used in tokenizers:
        asked = [{"role": "user", "content": "call anna please"}]
        ids = used.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
        tokens = used.convert_ids_to_tokens(ids)
        assert tokens == ["<|user|>", "call", "anna", "please", "<|assistant|>"]
        spoken = {"system": "play", "user": "call", "assistant": "I"}.items()
        text = used.apply_chat_template([{"role": r, "content": c} for r, c in spoken], tokenize=False)
        assert text == "<|system|>play<|user|>call<|assistant|>I<eos>"
