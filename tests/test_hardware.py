"""Data sheets and model shapes against published figures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless.models.hardware import GPUS, MODELS, Gpu, find_gpu, find_model
from rlhfless.traces.errors import InputError

# Parameters as the checkpoints' authors state them (sum over the safetensors index).
PUBLISHED = {
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-14B": 14_770_033_664,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen2-7B": 7_615_616_512,
    "Qwen3-8B": 8_190_735_360,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
    "Llama-2-7B": 6_738_415_616,
    "Llama-2-70B": 68_976_648_192,
}


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_parameters_are_the_published_ones(name: str, parameters: int) -> None:
    assert MODELS[name].parameters == parameters
    assert MODELS[name].weight_bytes == 2 * parameters


@pytest.mark.parametrize(
    ("name", "kv_bytes"),
    [("Qwen2.5-3B", 36_864), ("Qwen2.5-7B", 57_344), ("Llama-3.1-8B", 131_072), ("Llama-2-70B", 327_680)],
)
def test_kv_bytes_per_token(name: str, kv_bytes: int) -> None:
    assert MODELS[name].kv_bytes_per_token == kv_bytes


def test_kv_heads_are_divided_and_then_replicated() -> None:
    model = MODELS["Qwen2.5-3B"]  # 16 query heads, 2 KV heads
    on_gpu = [gpus * model.kv_bytes_per_token_on_gpu(gpus) for gpus in (1, 2, 4, 8)]
    assert on_gpu == [model.kv_bytes_per_token * copies for copies in (1, 1, 2, 4)]


@pytest.mark.parametrize(("name", "gpus"), [("Qwen2.5-0.5B", 4), ("Qwen2.5-7B", 8), ("Qwen2.5-3B", 3)])
def test_heads_that_do_not_divide_are_refused(name: str, gpus: int) -> None:
    with pytest.raises(InputError, match=f"{name} has .* which {gpus} GPUs do not divide"):
        MODELS[name].heads_per_gpu(gpus)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
def test_data_sheets_are_in_the_right_units(gpu: Gpu) -> None:
    """Orders of magnitude: what a wrong unit, or bits for bytes, would break."""
    assert 50e12 < gpu.flops < 3e15
    assert 20e9 < gpu.memory_bytes < 300e9
    assert 30 < gpu.flops / gpu.memory_bytes_per_second < 450
    assert gpu.node_bytes_per_second <= 50e9
    assert gpu.link_bytes_per_second < gpu.memory_bytes_per_second
    assert "assumed" in gpu.source


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("l40s", "L40S"),
        ("NVIDIA A100-80GB", "A100"),
        ("h100_sxm", "H100"),
        ("rtx4090", "RTX 4090"),
        ("RTX-4090", "RTX 4090"),
        ("4090", "RTX 4090"),
    ],
)
def test_gpu_names_are_spelled_freely(spelling: str, name: str) -> None:
    assert find_gpu(spelling).name == name


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen2.5-7B"),
        ("meta-llama/Llama-2-70b-hf", "Llama-2-70B"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "Llama-3.1-8B"),
        ("qwen2_5_3b", "Qwen2.5-3B"),
    ],
)
def test_model_names_are_spelled_freely(spelling: str, name: str) -> None:
    assert find_model(spelling).name == name


def test_every_name_finds_itself() -> None:
    assert [find_gpu(name).name for name in GPUS] == list(GPUS)
    assert [find_model(name).name for name in MODELS] == list(MODELS)


def test_an_unknown_gpu_names_the_closest_and_all_known() -> None:
    with pytest.raises(
        InputError, match=r"gpu: no data sheet of 'H1000', closest is H100 \(known: "
    ) as caught:
        find_gpu("H1000")
    assert "\n" not in str(caught.value)
    assert all(name in str(caught.value) for name in GPUS)


@given(st.text(max_size=20))
def test_any_other_text_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(InputError) as caught:
        find_gpu("no such " + text)
    assert len(str(caught.value).splitlines()) == 1
