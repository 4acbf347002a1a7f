"""Packing by hand-written integers: positions restart, boundaries, and which rows predict what."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from flatout.models.packed import flatten_samples, padded_num_boundaries


def batch():
    return flatten_samples(
        [
            (np.array([11, 12, 13]), np.array([True, False, True])),
            (np.array([21]), np.array([True])),
            (np.array([31, 32]), np.array([False, True])),
        ]
    )


def test_exact_integers():
    packed = batch()
    assert packed.token_ids.tolist() == [11, 12, 13, 21, 31, 32]
    assert packed.position_ids.tolist() == [0, 1, 2, 0, 0, 1]
    assert packed.cu_seqlens.tolist() == [0, 3, 4, 6]
    assert packed.max_seqlen == 3
    # 11 and 21 are first tokens: nothing before them in their document, so they are never predicted
    assert packed.label_rows.tolist() == [1, 4]
    assert packed.label_ids.tolist() == [13, 32]
    assert (packed.num_tokens, packed.num_label_tokens) == (6, 2)


def test_dtypes_and_moving():
    packed = batch().to(torch.device("cpu"))
    assert packed.cu_seqlens.dtype == torch.int32
    assert {packed.token_ids.dtype, packed.position_ids.dtype, packed.label_rows.dtype, packed.label_ids.dtype} == {
        torch.int64
    }


@pytest.mark.gpu
def test_a_batch_moved_to_the_host_is_whole():
    there = batch().to(torch.device("cuda"))
    # the GPU is busy, so an unfinished copy would be read
    torch.cuda._sleep(200_000_000)
    moved = replace(there, token_ids=there.token_ids + 1).to(torch.device("cpu"))
    assert torch.equal(moved.token_ids, batch().token_ids + 1)
    assert torch.equal(moved.cu_seqlens, batch().cu_seqlens)


def test_inputs_are_not_changed():
    loss_mask = np.array([True, True])
    flatten_samples([(np.array([1, 2], np.uint32), loss_mask)])
    assert loss_mask.tolist() == [True, True]


def test_many_random_packs_keep_every_label_inside_its_document():
    random = np.random.default_rng(0)
    for _ in range(50):
        lengths = random.integers(1, 12, random.integers(1, 8))
        samples = [(random.integers(0, 99, n), random.random(n) < 0.5) for n in lengths]
        packed = flatten_samples(samples)
        documents = np.repeat(np.arange(len(lengths)), lengths)
        rows = packed.label_rows.numpy()
        assert (documents[rows] == documents[rows + 1]).all()
        assert (packed.token_ids.numpy()[rows + 1] == packed.label_ids.numpy()).all()
        assert packed.num_label_tokens == sum(int(loss_mask[1:].sum()) for _, loss_mask in samples)


@pytest.mark.parametrize(
    "samples",
    [[], [(np.array([], int), np.array([], bool))], [(np.array([1, 2]), np.array([True]))]],
    ids=["none", "empty", "uneven"],
)
def test_bad_samples(samples):
    with pytest.raises(ValueError, match="sample"):
        flatten_samples(samples)


def test_kernel_shapes_add_a_tail_document_without_labels():
    samples = [(np.arange(1, 201), np.ones(200, bool)), (np.arange(1, 31), np.ones(30, bool))]
    plain, filled = flatten_samples(samples), flatten_samples(samples, num_boundaries=padded_num_boundaries(2))
    assert (filled.num_tokens, len(filled.cu_seqlens), filled.max_seqlen) == (256, 64, 256)
    assert filled.cu_seqlens[:5].tolist() == [0, 200, 230, 256, 256]
    assert filled.position_ids[228:232].tolist() == [28, 29, 0, 1]
    assert filled.label_rows.tolist() == plain.label_rows.tolist()
    assert filled.label_ids.tolist() == plain.label_ids.tolist()
    assert [padded_num_boundaries(n) for n in (1, 62, 63, 200)] == [64, 64, 128, 256]
    whole = flatten_samples([(np.arange(1, 129), np.ones(128, bool))], num_boundaries=padded_num_boundaries(1))
    assert (whole.num_tokens, whole.max_seqlen, whole.cu_seqlens[:3].tolist()) == (128, 128, [0, 128, 128])
