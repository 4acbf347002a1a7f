"""What decays is one rule for every strategy and optimizer: transformers' own, among what is trained."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, Trainer

from flatout.config.read import make_config
from flatout.config.schema import OPTIMIZERS, OptimConfig
from flatout.errors import UsageError
from flatout.optim.build import layer_norm_parameters, make_optimizer, split_by_decay
from flatout.optim.update import BackwardUpdate
from flatout.parallel.rank import Rank
from flatout.parallel.strategies.protocol import Single
from flatout.planner.parallel_layout import SINGLE_RANK
from flatout.trainer.run import train
from tests.usual import usual

TEXT = {
    "vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 48, "max_position_embeddings": 2048, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip


SPARED: list[tuple[str, dict[str, Any]]] = [
    ("cohere", {"use_qk_norm": True}), ("gpt_oss", {"num_local_experts": 4}), ("gpt2", {}), ("gemma2", {}),
    ("qwen3", {}), ("gpt_neox", {}), ("olmo2", {}), ("phi", {}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "changes"), usual(SPARED, SPARED[:4]))
def test_norms_and_biases_are_those_that_transformers_spares(kind, changes):
    shape = {**TEXT, **changes} if kind != "gpt2" else {"vocab_size": 512, "n_embd": 32, "n_layer": 2, "n_head": 4}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**shape))
    # the method reads nothing of the trainer
    expected = set(Trainer.get_decay_parameter_names(None, model))
    names = [name for name, _ in model.named_parameters()]
    decayed, spared = split_by_decay(names, layer_norm_parameters(model))
    assert set(decayed) == expected & set(names)
    assert set(spared) == set(names) - expected
    assert spared
    dimensions = {parameter.ndim for name, parameter in model.named_parameters() if name in spared}
    assert dimensions == ({1, 2} if kind in ("cohere", "gpt_oss") else {1}), "shape says nothing"


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    """A text model with a vision tower, which text does not reach."""
    folder = tmp_path_factory.mktemp("seeing")
    text = {**TEXT, "sliding_window": 512, "query_pre_attn_scalar": 8, "model_type": "gemma3_text"}
    shape = CONFIG_MAPPING["gemma3"](text_config=text, vision_config=VISION, mm_tokens_per_image=4)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(shape).save_pretrained(folder)
    return folder


def run_on(seeing: Path, tiny: Any, run_dir: Path, *overrides: str, **sections: Any) -> Any:
    config = tiny.config(
        run_dir,
        "optim.lr=0.1",
        "optim.weight_decay=0.5",
        *overrides,
        model={"name": str(seeing), "precision": "fp32"},
        data={"tokenizer": str(tiny.model_dir)},
        batch={"max_steps": 2},
        **sections,
    )
    train(config)
    return config


@pytest.mark.parametrize("optimizer", usual(["adamw", "adamw8bit"], ["adamw"]))
def test_full_training_on_text_leaves_a_vision_tower_alone(seeing, tiny, tmp_path, capsys, optimizer):
    config = run_on(seeing, tiny, tmp_path / "run", f"optim.name={optimizer}", method="full")
    assert "stay frozen: they are outside the decoder of texts" in " ".join(capsys.readouterr().out.split())
    before = load_file(seeing / "model.safetensors")
    after = load_file(config.folder / "final" / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        is_seeing = "vision" in name or "multi_modal" in name
        assert torch.equal(tensor, after[name]) == is_seeing, name


def adapters_without_and_with_decay(model: Path, tiny: Any, tmp_path: Path) -> list[dict[str, torch.Tensor]]:
    finals = []
    for name, decay in (("without", 0.0), ("with", 0.5)):
        config = run_on(model, tiny, tmp_path / name, f"optim.weight_decay={decay}")
        finals.append(load_file(config.folder / "final" / "adapter_model.safetensors"))
    return finals


def test_adapters_that_text_does_not_reach_do_not_decay(seeing, tiny, tmp_path):
    """All adapters lie in one flat tensor, which decays as a whole."""
    without, with_decay = adapters_without_and_with_decay(seeing, tiny, tmp_path)
    for name, tensor in without.items():
        if "lora_A" in name:
            assert "vision" not in name
            assert not torch.equal(tensor, with_decay[name]), name
    with pytest.raises(UsageError, match=r"vision_tower.* is only in the vision tower, which stays frozen"):
        run_on(seeing, tiny, tmp_path / "blind", lora={"targets": r".*vision_tower.*fc1"})


@pytest.fixture(scope="module")
def indexed(tmp_path_factory):
    """A model whose layers choose keys by an indexer, which gets no gradient."""
    folder = tmp_path_factory.mktemp("indexed")
    sizes = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1}
    shape = {**TEXT, **sizes, **experts, "topk_group": 1, "num_key_value_heads": 4, "index_head_dim": 16}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIG_MAPPING["deepseek_v32"](**shape)).save_pretrained(folder)
    return folder


UPDATES = [("adamw8bit", "step"), ("adamw", "backward"), ("adamw", "step")]


@pytest.mark.parametrize(("optimizer", "update"), usual(UPDATES, UPDATES[:1]))
def test_what_no_gradient_reaches_stays_as_it_is(indexed, tiny, tmp_path, capsys, optimizer, update):
    settings = (f"optim.name={optimizer}", f"full.update={update}", "batch.micro_batch_tokens=2000")
    clipping = ("optim.max_grad_norm=null",) if update == "backward" else ()
    config = run_on(indexed, tiny, tmp_path / "run", *settings, *clipping, method="full")
    assert "as no gradient reaches them: model.layers.*.self_attn.indexer." in " ".join(capsys.readouterr().out.split())
    before = load_file(indexed / "model.safetensors")
    after = load_file(config.folder / "final" / "model.safetensors")
    assert before.keys() == after.keys()
    moved = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert {name for name in before if name not in moved} == {name for name in before if "indexer" in name}


def test_adapters_that_no_gradient_reaches_stay_as_they_are(indexed, tiny, tmp_path):
    without, with_decay = adapters_without_and_with_decay(indexed, tiny, tmp_path)
    same = {name for name, tensor in without.items() if torch.equal(tensor, with_decay[name])}
    assert same == {name for name in without if "indexer" in name}
    assert same


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_missing_gradient_is_a_gradient_of_zero(name):
    """In a step that does not reach a weight (an expert no token went to), it moves as under ranks that add zeros."""

    def make() -> tuple[dict[str, torch.nn.Parameter], torch.optim.Optimizer]:
        named = {key: torch.nn.Parameter(torch.full((64, 64), 0.5)) for key in ("reached", "missed")}
        config = OptimConfig.model_validate({"name": name, "lr": 0.1, "weight_decay": 0.1})
        return named, make_optimizer(named, config, matrices=named)

    def loss(named: dict[str, torch.nn.Parameter], step: int) -> torch.Tensor:
        return sum((p.square().sum() for key, p in named.items() if step == 0 or key == "reached"), torch.zeros(()))

    (zeros, zeros_optimizer), (single, single_optimizer), (inside, inside_optimizer) = make(), make(), make()
    single_rank = Single(Rank(), torch.device("cpu"), make_config({"model": {"name": "x"}}), SINGLE_RANK)
    strategy, backward = single_rank, BackwardUpdate(inside_optimizer, list(inside.values()))
    for step in range(3):
        for named, optimizer in ((zeros, zeros_optimizer), (single, single_optimizer)):
            optimizer.zero_grad(set_to_none=True)
            loss(named, step).backward()
            if named is single:
                strategy.sum_gradients(list(named.values()))
            else:
                for parameter in named.values():
                    parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            optimizer.step()
        backward.start(0.1)
        loss(inside, step).backward()
        backward.finish()
    for key, parameter in zeros.items():
        assert torch.equal(parameter, single[key])
        assert torch.equal(parameter, inside[key])
