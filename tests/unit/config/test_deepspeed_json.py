"""A DeepSpeed JSON: what our settings fill, what they refuse, and where the file is found."""

import json
from typing import Any

import pytest

from flatout.config.deepspeed import fill, offloads, stage_of
from flatout.config.read import load_config, make_config
from flatout.config.schema import Config
from flatout.errors import UsageError

# as transformers' documentation shows it, with every value left to the trainer
AUTO = {
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale_window": 1000},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True},
    },
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_max_lr": "auto", "total_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "reduce_bucket_size": "auto",
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}


def config_of(given: Any, **sections: Any) -> Config:
    values = {"model": {"name": "m", "precision": "bf16"}, "strategy": "deepspeed", "deepspeed": given}
    return make_config({**values, **sections})


def test_our_values_fill_auto_and_what_is_left_out():
    config = config_of(AUTO, optim={"max_grad_norm": 0.5})
    filled = fill(config, num_ranks=4, precision="bf16")
    assert filled["gradient_clipping"] == 0.5
    # DeepSpeed's own rule: the batch is micro-batch x accumulation x ranks
    batch = [filled[name] for name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")]
    assert (filled["train_batch_size"], batch) == (4, [1, 1])
    assert (filled["bf16"]["enabled"], filled["fp16"]["enabled"]) == (True, False)
    assert filled["zero_optimization"] == {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
    }
    assert filled["data_types"] == {"grad_accum_dtype": "fp32"}
    assert filled["communication_data_type"] == "fp32"
    assert filled["zero_allow_untested_optimizer"] is True
    assert filled["zero_force_ds_cpu_optimizer"] is False
    # ours take these places, and nothing is left to be filled
    assert "optimizer" not in filled
    assert "scheduler" not in filled
    assert "auto" not in json.dumps(filled)
    # what the user wrote stays as it was
    assert config.deepspeed == AUTO


def test_nothing_given_is_stage_2_and_never_clips_without_a_limit():
    config = config_of(None, optim={"max_grad_norm": None}, comm={"compress": "bf16"})
    filled = fill(config, num_ranks=2, precision="fp32")
    assert (filled["zero_optimization"], filled["gradient_clipping"]) == ({"stage": 2}, 0.0)
    assert filled["communication_data_type"] == "bf16"
    assert filled["bf16"]["enabled"] is False
    assert (stage_of(None), offloads(None), offloads(AUTO)) == (2, False, True)


def test_autocast_keeps_fp32_weights():
    given = {"zero_optimization": {"stage": 3}, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    filled = fill(config_of(given), num_ranks=2, precision="bf16")
    assert filled["bf16"]["enabled"] is False
    assert filled["torch_autocast"]["enabled"] is True


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        ({"gradient_clipping": 5.0}, ("gradient_clipping is 5.0", "optim.max_grad_norm is 1.0")),
        ({"train_batch_size": 64}, ("train_batch_size is 64", "batch.samples_per_step is 32")),
        ({"train_micro_batch_size_per_gpu": 4}, ("train_micro_batch_size_per_gpu", "batch.micro_batch_tokens")),
        ({"gradient_accumulation_steps": 1}, ("gradient_accumulation_steps", "batch.micro_batch_tokens")),
        ({"bf16": {"enabled": False}}, ("bf16.enabled is False", "model.precision is 'bf16'")),
        ({"fp16": {"enabled": True}}, ("fp16.enabled is True", "model.precision is 'bf16'")),
        ({"communication_data_type": "fp16"}, ("communication_data_type is 'fp16'", "comm.compress is 'none'")),
        ({"prescale_gradients": True}, ("prescale_gradients is True", "label tokens")),
        ({"optimizer": {"type": "Lamb"}}, ("optimizer.type is 'Lamb'", "optim.name is 'adamw'")),
        ({"optimizer": {"params": {"lr": 1.0}}}, ("optimizer.params.lr is 1.0", "optim.lr is 0.0002")),
        ({"optimizer": {"params": {"betas": [0.8, 0.9]}}}, ("betas is [0.8, 0.9]", "optim.beta1")),
        ({"optimizer": {"params": {"muon": 1}}}, ("optimizer.params.muon", "flatout's optimizer")),
        ({"scheduler": {"type": "OneCycle"}}, ("scheduler.type is 'OneCycle'", "schedule.kind is 'linear'")),
        ({"scheduler": {"params": {"warmup_max_lr": 1}}}, ("warmup_max_lr is 1", "optim.lr is 0.0002")),
        ({"activation_checkpointing": {"partition_activations": True}}, ("activation_checkpointing", "recompute")),
        ({"zero_optimization": {"stage": 0}}, ("zero_optimization.stage is 0", "strategy: ddp")),
        ({"bf16": {"enabled": "auto"}, "zero_optimization": {}}, ("zero_optimization.stage is 0",)),
        ({"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}}, ("zenflow",)),
        ({"zero_optimization": {"stage": 3, "stage3_module_granularity_threshold": 9}}, ("granularity",)),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, ("torch_autocast.dtype", "model.precision")),
    ],
)
def test_a_value_that_contradicts_ours_names_both(entry, named):
    with pytest.raises(UsageError) as caught:
        config_of({"zero_optimization": {"stage": 2}, **entry})
    for text in named:
        assert text in str(caught.value)


def test_equal_values_are_no_contradiction():
    given = {
        "gradient_clipping": 1,
        "train_batch_size": 32,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_max_lr": 2e-4, "warmup_num_steps": 10}},
        "zero_optimization": {"stage": 1},
        "activation_checkpointing": {},
    }
    config = config_of(given, schedule={"warmup_steps": 10})
    assert fill(config, num_ranks=2, precision="bf16")["zero_optimization"] == {"stage": 1}


def test_precision_auto_is_decided_by_the_device():
    given = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    config = config_of(given, model={"name": "m"})
    with pytest.raises(ValueError, match=r"bf16.enabled is True, but model.precision is 'fp32'"):
        fill(config, num_ranks=2, precision="fp32")


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"strategy": "ddp", "deepspeed": {}}, "deepspeed needs a strategy of its own, not ddp"),
        ({"strategy": "deepspeed", "sharding": {"prefetch": 2}}, "sharding has no effect with strategy: deepspeed"),
        ({"strategy": "deepspeed", "model": {"name": "m", "precision": "fp64"}}, "deepspeed keeps fp32 weights"),
        ({"strategy": "deepspeed", "model": {"name": "m", "precision": "fp16"}}, "fp16"),
        ({"strategy": "deepspeed", "deepspeed": "nowhere.json"}, "nowhere.json: the file is missing"),
    ],
)
def test_settings_that_do_not_go_together(values, named):
    with pytest.raises(UsageError, match=named):
        make_config({"model": {"name": "m"}, **values})


@pytest.mark.parametrize(
    "values",
    [
        {"strategy": "deepspeed", "deepspeed": {}},
        {"strategy": "deepspeed"},
        {"strategy": "deepspeed", "model": {"name": "m", "precision": "bf16"}, "deepspeed": {"bf16": {}}},
        {"strategy": "deepspeed", "deepspeed": {"zero_optimization": {"stage": 2, "offload_optimizer": {}}}},
        {"strategy": "deepspeed", "deepspeed": {"zero_optimization": {"stage": 1}, "train_batch_size": "auto"}},
        {"strategy": "deepspeed", "deepspeed": {"optimizer": {"type": "AdamW", "params": {}}}},
        {"strategy": "fsdp", "sharding": {"prefetch": 2}},
    ],
)  # fmt: skip
def test_settings_that_go_together(values):
    assert make_config({"model": {"name": "m"}, **values}).strategy == values["strategy"]


def test_the_file_is_found_beside_the_yaml(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    (tmp_path / "run.yaml").write_text("model: {name: m}\nstrategy: deepspeed\ndeepspeed: ds.json\n")
    assert load_config(tmp_path / "run.yaml").deepspeed == {"zero_optimization": {"stage": 1}}
    (tmp_path / "ds.json").write_text('{"zero_optimization": {}, "zero_optimization": {"stage": 1}}')
    with pytest.raises(UsageError, match='"zero_optimization" is given twice'):
        load_config(tmp_path / "run.yaml")
    (tmp_path / "ds.json").write_text("[1]")
    with pytest.raises(UsageError, match="expected a JSON object, found a list"):
        load_config(tmp_path / "run.yaml")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"zero_optimization": [2]}, r"zero_optimization is \[2\]; expected an object"),
        ({"zero_optimization": {"stage": True}}, "zero_optimization.stage is True"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": "cpu"}}, "offload_optimizer is 'cpu'"),
        ({"optimizer": ["Adam"]}, "optimizer is"),
        ({"optimizer": {"type": "AdamW", "params": [1]}}, "optimizer.params is"),
        ({"scheduler": [1]}, "scheduler is"),
        ({"scheduler": {"type": {"a": 1}}}, "scheduler.type is"),
    ],
)
def test_sections_of_another_kind_are_named(given, named):
    with pytest.raises(UsageError, match=named):
        make_config({"model": {"name": "m", "precision": "fp32"}, "strategy": "deepspeed", "deepspeed": given})


def test_a_section_of_null_is_one_left_out():
    settings = {"model": {"name": "m"}, "strategy": "deepspeed", "method": "full"}
    filled = [
        fill(make_config({**settings, "deepspeed": given}), num_ranks=2, precision="bf16")
        for given in ({"zero_optimization": {"stage": 2}}, {"zero_optimization": {"stage": 2}, "bf16": None})
    ]
    assert filled[0] == filled[1]
