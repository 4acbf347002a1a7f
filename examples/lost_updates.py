"""Measure how much of a small update reaches the output of a linear layer in bf16. It only needs torch.

    python examples/lost_updates.py

Each line is the projection of the change in the output onto the exact change; 1.00 means that all of it arrives. The
weights are random, so the figures differ slightly from those of a trained model.
"""

import torch

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
BF16 = torch.bfloat16
x = torch.randn(4096, 1024, device=device).to(BF16)
weight = (torch.randn(2048, 1024, device=device) / 32).to(BF16)


def share(with_change: torch.Tensor, without: torch.Tensor, exact: torch.Tensor) -> str:
    """Project the change that is in an output on the exact one."""
    arrived = with_change.double() - without.double()
    return f"{(arrived * exact).sum() / (exact * exact).sum():.2f}"


def lora() -> None:
    """The adapter's term is about a tenth of a rounding step of y."""
    a = (torch.randn(16, 1024, device=device) / 32).to(BF16)
    b = (torch.randn(2048, 16, device=device) * 1e-4).to(BF16)
    low = x @ a.T
    exact = low.double() @ b.double().T
    y = x @ weight.T
    print("LoRA, y = x W^T rounded, then + (x A^T) B^T: ", share(y + low @ b.T, y, exact))
    # a CPU adds in one sum; torch's addmm on a GPU rounds the product first
    print("LoRA, torch.addmm((x A^T) B^T, x, W^T):      ", share(torch.addmm(low @ b.T, x, weight.T), y, exact))
    whole = torch.cat([x, low], 1) @ torch.cat([weight, b], 1).T
    print("LoRA, one sum over (x | x A^T)(W | B)^T:     ", share(whole, x.double() @ weight.double().T, exact))


def masters() -> None:
    """One update of fp32 masters, a twentieth of a rounding step of a typical weight."""
    update = torch.randn(2048, 1024, device=device).sign() * 5e-6
    exact = x.double() @ update.double().T
    y = x.float() @ weight.float().T
    master = weight.float()
    at_values = x.float() @ (master + update).to(BF16).float().T
    print("masters that start at the file's bf16 values:", share(at_values, y, exact))
    bits = torch.randint(-(2**15) + 1, 2**15, weight.shape, dtype=torch.int32, device=device)
    dithered = (master.view(torch.int32) + bits).view(torch.float32)
    dithered = torch.where(dithered.to(BF16) == weight, dithered, master)
    at_random = x.float() @ (dithered + update).to(BF16).float().T
    print("masters at random places that round there:   ", share(at_random, y, exact))


lora()
masters()
