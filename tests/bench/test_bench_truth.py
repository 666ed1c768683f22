"""The benchmarks' truth and refusals: a wrong row, float64, masks, the CUDA backend."""

from __future__ import annotations

import dataclasses
import importlib

import pytest
import torch

from bench import linear_smopd_loss, smopd_loss, topk_forward_kl
from bench.__main__ import names
from bench.harness import eager_forms, objective, truth
from bench.harness.accuracy import judge
from bench.harness.inputs import head_logits, head_products, head_steps, on_head, on_logits
from bench.harness.providers import ours, peer
from bench.harness.run import Options, run_benchmarks
from bench.harness.types import Benchmark, Case, Expected, Outputs, Ranking

N_ROWS, WRONG_ROW = 60, 31
LINEAR = linear_smopd_loss.run(lambda *a: linear_smopd_loss.fused(*a, recompute=False))
FORMS = {
    "smopd_loss": (smopd_loss.BENCHMARK, smopd_loss.run(smopd_loss.fused)),
    "topk_forward_kl": (topk_forward_kl.BENCHMARK, topk_forward_kl.run(topk_forward_kl.fused)),
    "linear_smopd_loss": (linear_smopd_loss.BENCHMARK, LINEAR),
}


def spoiled(outputs: Outputs, name: str) -> Outputs:
    """One row of one output is another row's."""
    value = outputs[name].clone()
    value[WRONG_ROW] = value[WRONG_ROW - 1]
    return outputs | {name: value}


def told_of(benchmark: Benchmark, run, dtype: str) -> list[dict]:
    case = Case(N=N_ROWS, V=50, D=16, kappa=4, dtype=dtype)
    (reference,) = ours(run, backends=("reference",))
    told: list[dict] = []
    judged = dataclasses.replace(reference, slack=1.0)  # as a kernel is
    one = dataclasses.replace(benchmark, providers=(judged,), cases={"check": (case,)})
    run_benchmarks({"one": one}, Options(device="cpu", case_set="check"), told.append)
    return told


@pytest.mark.parametrize(
    ("form", "name", "dtype"),
    [
        ("smopd_loss", "logp", "float32"),
        ("smopd_loss", "kl", "float32"),
        ("smopd_loss", "entropy", "bfloat16"),
        ("smopd_loss", "dlogits", "bfloat16"),
        ("topk_forward_kl", "dlogits", "float32"),
        ("linear_smopd_loss", "logp", "float32"),
        ("linear_smopd_loss", "kl", "bfloat16"),
        ("linear_smopd_loss", "dhidden", "float32"),
        ("linear_smopd_loss", "dhidden", "bfloat16"),
    ],
)
def test_one_wrong_row_is_refused(form: str, name: str, dtype: str) -> None:
    benchmark, run = FORMS[form]
    (right,) = told_of(benchmark, run, dtype)
    assert "refused" not in right
    (wrong,) = told_of(benchmark, lambda given: spoiled(run(given), name), dtype)
    assert wrong["refused"].startswith(f"{name} is off by")


def test_a_peers_rows_between_the_few_are_judged_by_their_norm() -> None:
    provider, value = peer("theirs", lambda given: {}, slack=10.0), torch.ones(100, 4, dtype=torch.float64)
    truth = {"x": Expected(value, torch.full_like(value, 1e-6))}
    between = torch.zeros_like(value)
    between[15:25] = 1.0
    assert judge(provider, {"x": value + between}, truth)[0] is None
    for wrong in (value + 2.0 * between, value.masked_fill(between > 0, float("nan"))):
        fault, *_ = judge(provider, {"x": wrong}, truth)
        assert fault is not None and fault.startswith("x is off by")


def test_ids_may_be_swapped_where_rounding_swaps_their_values() -> None:
    """Rows of candidates [5, 9, 5, 2] of values 0, -1e-7, -1, -1 - 1e-7; three are asked for."""
    (provider,) = ours(lambda given: {}, backends=("reference",))
    ids = torch.tensor([[5, 9, 5, 2]])
    values = torch.tensor([[0.0, -1e-7, -1.0, -1.0 - 1e-7]], dtype=torch.float64)
    ranking = Ranking(ids, values, torch.full_like(values, 6e-8))
    truth = {"ids": Expected(ids[:, :3], exact=True, ranking=ranking)}
    for right in ([5, 9, 5], [9, 5, 5], [5, 9, 2], [9, 5, 2]):
        assert judge(provider, {"ids": torch.tensor([right])}, truth)[0] is None
    for wrong, n_places in (([5, 5, 9], 3), ([9, 9, 5], 2), ([2, 9, 5], 1), ([5, 9, 7], 1), ([5, 5, 2], 3)):
        fault, *_ = judge(provider, {"ids": torch.tensor([wrong])}, truth)
        assert fault == f"ids differs in {n_places} places, expected none"


def test_ids_that_rounding_moves_far_are_all_there_and_once() -> None:
    """Candidates 0 to 7, each 1e-7 below the one before, and 6e-8 to be rounded: neighbours are near."""
    (provider,) = ours(lambda given: {}, backends=("reference",))
    ids, values = torch.arange(8)[None], -1e-7 * torch.arange(8, dtype=torch.float64)[None]
    ranking = Ranking(ids, values, torch.full_like(values, 6e-8))
    truth = {"ids": Expected(ids[:, :5], exact=True, ranking=ranking)}
    for right in ([0, 1, 2, 3, 4], [1, 0, 3, 2, 5]):
        assert judge(provider, {"ids": torch.tensor([right])}, truth)[0] is None
    for wrong, why in (([1, 0, 3, 2, 3], 2), ([1, 2, 3, 4, 5], 1)):  # 3 twice; 0 is lost
        fault, *_ = judge(provider, {"ids": torch.tensor([wrong])}, truth)
        assert fault == f"ids differs in {why} places, expected none"


@pytest.mark.parametrize("flags", [(), ("merge", "tail", "entropy")])
def test_a_logit_that_may_be_rounded_either_way_is_no_fault(
    flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a head's logits between two numbers, moved to the other one; and where none may move."""
    monkeypatch.setattr("bench.harness.inputs.CANCELLATION", 2.0**-12)
    torch.manual_seed(0)
    scenario = on_head(Case(N=64, V=300, D=64, M=2, kappa=8, dtype="bfloat16", flags=flags), "cpu")
    expected = truth.loss_truth(scenario)
    step_NV = head_steps(scenario.hidden_ND, scenario.weight_VD)
    logits_NV = scenario.chunk(slice(None))
    products_NV = head_products(scenario.hidden_ND, scenario.weight_VD)
    sign_NV = (products_NV - logits_NV).sign()
    moved = objective.exact(logits_NV + sign_NV * step_NV, scenario.tokens, scenario.settings)
    (provider,) = ours(lambda given: {}, backends=("reference",))
    for name in ("logp", "kl", "entropy"):
        besides_N, value_N = expected[name].besides, expected[name].value
        assert besides_N is not None and bool((step_NV > 0).any(-1).all())
        off_N = (getattr(moved, name) - value_N).abs()
        assert bool((off_N <= besides_N + 1e-12).all()) and float((off_N / besides_N).max()) > 0.2
        only = {name: dataclasses.replace(expected[name], bound=1e-9)}
        assert judge(provider, {name: getattr(moved, name)}, only)[0] is None
        fault, *_ = judge(provider, {name: value_N + 1.1 * besides_N + 1e-3}, only)
        assert fault is not None and fault.startswith(f"{name} is off by")


def test_a_wrong_loss_is_refused() -> None:
    benchmark, run = FORMS["smopd_loss"]
    (wrong,) = told_of(benchmark, lambda given: (out := run(given)) | {"loss": out["loss"] + 1e-3}, "float32")
    assert wrong["refused"].startswith("loss is off by")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_truth_of_a_head_is_made_in_float64(dtype: str) -> None:
    torch.manual_seed(0)
    scenario = on_head(Case(N=5, V=40, D=8, kappa=3, dtype=dtype), "cpu")
    exact = scenario.hidden_ND.double() @ scenario.weight_VD.double().T
    wanted = exact if dtype == "float32" else exact.bfloat16().double()
    torch.testing.assert_close(
        head_logits(scenario.hidden_ND, scenario.weight_VD), wanted, rtol=1e-14, atol=1e-13
    )
    wanted = truth.loss_truth(scenario)
    assert {wanted[name].value.dtype for name in ("logp", "kl", "loss", "dhidden", "dweight")} == {
        torch.float64
    }


def test_all_rows_are_checked_where_they_are_cheap() -> None:
    assert truth.checked_rows(256, 151_936, "cpu").tolist() == list(range(256))
    rows = truth.checked_rows(8192, 151_936, "cpu")
    assert len(rows) == len(rows.unique()) > 400 and (int(rows[0]), int(rows[-1])) == (0, 8191)


@pytest.mark.parametrize("name", names())
def test_masks_are_in_checks_and_where_a_timed_case_says_so(name: str) -> None:
    cases = importlib.import_module(f"bench.{name}").BENCHMARK.cases
    timed = [case for kind in ("cpu", "cuda", "quick") for case in cases[kind]]
    assert not [
        case for case in timed if "masked" in case.flags and (case.main or name != "linear_smopd_loss")
    ]
    if "loss" in name or "forward_kl" in name:
        assert [case for case in cases["check"] if "masked" in case.flags]


def test_only_flagged_cases_have_masked_rows_and_their_ceiling_is_of_the_others() -> None:
    torch.manual_seed(0)
    plain = Case(N=200, V=9, D=4, kappa=3)
    assert bool((on_logits(plain, "cpu").tokens.pg_weight_N != 0).all())
    masked = on_head(dataclasses.replace(plain, flags=("masked",)), "cpu")
    n_counted = int((masked.tokens.kl_weight_N != 0).sum())
    assert 150 < n_counted < 200
    gemms = linear_smopd_loss.BENCHMARK.ceilings(masked)[0]
    assert gemms.flops == 6 * n_counted * masked.weight_VD.numel()


def test_eager_divides_by_no_temperature_of_1() -> None:
    logits = torch.ones(2, 3)
    assert eager_forms.tempered(logits, 1.0) is logits
    assert float(eager_forms.tempered(logits, 0.5)[0, 0]) == 2.0


def test_providers_are_chosen_by_name_kind_and_backend() -> None:
    providers = smopd_loss.BENCHMARK.providers

    def kept(**options) -> set[str]:
        return {p.name for p in providers if Options(device="cpu", case_set="quick", **options).wants(p)}

    assert kept(providers=("cpp",)) == {"cpp", "cpp in place"}
    assert kept(without=("cpp",)) == {provider.name for provider in providers} - {"cpp", "cpp in place"}
    assert kept(providers=("ours",), without=("triton", "cpp")) == {"reference", "reference in place"}
