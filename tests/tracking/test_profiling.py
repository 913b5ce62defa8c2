"""Where a step's time goes: what is counted, what it is divided by, and the traces."""

import pytest
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from pipeline.config.cli import build_parser, parse
from pipeline.config.settings import ModelSettings
from pipeline.errors import UserError
from pipeline.models import lora
from pipeline.tracking.profiling import Work, peak_of, rates, work_of
from scripts.proofs.grid import small_model

# FLOPs, of a model of 2 layers, 4 heads of size 8, hidden size 32, MLP of 64, 16 tokens

ATTENTION = 32 * 32 + 2 * 32 * 16 + 32 * 32  # queries, keys and values of 2 heads, output
LAYER = ATTENTION + 3 * 32 * 64 + 2 * 32 + 2 * 8  # the last: norms
BODY = 2 * LAYER + 32


def test_parameters_are_counted_without_the_embedding_and_the_tied_output_layer_by_itself():
    work = work_of(small_model())
    assert work == Work(body=BODY, head=16 * 32, lora=0, attention=2 * 4 * 8, trains_all=True)


def test_a_text_model_inside_another_is_counted():
    text = {**small_model().config.to_dict(), "model_type": "gemma3_text"}
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "image_size": 28}
    config = Gemma3Config(text_config=text, vision_config=vision | {"num_attention_heads": 2})
    assert work_of(Gemma3ForConditionalGeneration(config)).attention == 2 * 4 * 8


def test_a_token_costs_2_flops_a_parameter_to_sample_and_6_to_train_and_attention_12_lhqt():
    work = Work(body=1000, head=100, lora=0, attention=64, trains_all=True)
    assert work.of_sampling(tokens=10, sampled=4, length=0) == 10 * 2 * 1000 + 4 * 2 * 100
    assert work.of_update(tokens=10, sampled=4, length=0) == 10 * 6 * 1000 + 4 * 6 * 100
    body = Work(body=0, head=0, lora=0, attention=64, trains_all=True)
    assert body.of_sampling(tokens=10, sampled=4, length=7) == 10 * 4 * 64 * 7
    assert body.of_update(tokens=10, sampled=4, length=7) == 10 * 12 * 64 * 7


def test_under_lora_frozen_parameters_get_no_gradient_and_the_sampler_has_them_merged():
    settings = ModelSettings(use_peft=True, lora_r=4)
    work = work_of(lora.attach(small_model(), settings, "base", seed=1))
    sizes = [(32, 32), (32, 16), (32, 16), (32, 32), (32, 64), (32, 64), (64, 32)]
    adapters = 2 * 4 * sum(a + b for a, b in sizes)
    assert work == Work(body=BODY, head=512, lora=adapters, attention=64, trains_all=False)
    assert work.of_sampling(1, 1, 0) == 2 * BODY + 2 * 512
    assert work.of_update(1, 1, 0) == 4 * BODY + 6 * adapters + 4 * 512


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA A10G", None),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA H200 MIG 3g.71gb", None),
        ("Tesla T4", None),
    ],
)
def test_the_peak_of_a_gpu_is_known_by_its_name_or_not_at_all(name, peak):
    assert peak_of(name) == peak


# Rates

TOTAL = {  # of two ranks
    **{"step_s": 20.0, "sample_s": 10.0, "environment_s": 1.0, "update_s": 6.0, "wait_s": 4.0},
    **{"episodes": 50, "sampled": 1000, "sample_tokens": 3000, "sample_padded": 4000},
    **{"update_tokens": 2400, "update_padded": 3000, "bytes": 123},
    **{"sample_flops": 4e13, "update_flops": 6e13},
}


def test_seconds_are_means_of_ranks_tokens_are_those_of_all_and_flops_those_of_one():
    assert rates(TOTAL, num_ranks=2, peak=None) == {
        "perf/step_s": 10.0,
        "perf/sample_s": 5.0,
        "perf/environment_s": 0.5,
        "perf/update_s": 3.0,
        "perf/wait_s": 2.0,
        "perf/episodes_per_s": 5.0,
        "perf/tokens_per_s": 100.0,
        "perf/sample_tokens_per_s": 200.0,
        "perf/update_tokens_per_s": 800.0,
        "perf/sample_padding_share": 0.25,
        "perf/update_padding_share": 0.2,
        "perf/sample_flops_per_s": 4e12,
        "perf/update_flops_per_s": 1e13,
        "perf/flops_per_s": 5e12,
        "perf/exchanged_bytes": 123,
    }


def test_mfu_is_the_share_of_the_peak_where_that_is_known():
    found = rates(TOTAL, num_ranks=2, peak=1e14)
    assert {name: value for name, value in found.items() if name.endswith("mfu")} == {
        "perf/mfu": 0.05,
        "perf/sample_mfu": 0.04,
        "perf/update_mfu": 0.1,
    }


def test_a_step_without_an_update_has_no_rates_of_one():
    nothing = {"update_s": 0.0, "update_tokens": 0, "update_padded": 0, "update_flops": 0}
    found = rates({**TOTAL, **nothing}, num_ranks=2, peak=None)
    assert found["perf/update_tokens_per_s"] == found["perf/update_padding_share"] == 0
    assert found["perf/update_flops_per_s"] == 0


# The setting


def test_profile_names_steps_that_are_trained():
    config = parse(["--profile", "2,3"])
    assert config.run.profile == [2, 3]
    assert "steps with a torch.profiler trace" in build_parser(config).format_help()
    for argv, message in (
        (["--profile", "0"], "--profile: got '0'; it should be greater than 0"),
        (["--profile", "9", "--max-steps", "8"], "profile: got step 9, but 8 are trained"),
        (["--profile", "1", "--no-grpo"], "profile: got step 1, but 0 are trained"),
    ):
        with pytest.raises(UserError, match=message):
            parse(argv)
