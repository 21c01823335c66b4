"""Train a small sequence model on jagged histories with gem_kernels; a minute on a CPU, also on a GPU.

    pip install . && python examples/sequence_model.py

A history is a list of items of any length, also none; the label says whether the candidate item is in it. The model:
self-attention over the history, then GDPA with the candidate as the only query. Nothing is padded.
"""

import torch
from gem_kernels import gdpa, jagged, jagged_attention
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, normalize

NUM_ITEMS, WIDTH, HEADS = 50, 64, 2
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32  # of the attention; parameters are float32


class SequenceModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.items, self.head = nn.Embedding(NUM_ITEMS, WIDTH), nn.Linear(2 * WIDTH, 1)
        self.qkv, self.out, self.query, self.kv = (nn.Linear(WIDTH, n * WIDTH) for n in (3, 1, 1, 2))

    def forward(self, history, offsets, candidate):
        """history int64 [T], offsets [B + 1], candidate int64 [B] -> logits [B]."""
        x, target = self.items(history), self.items(candidate)
        q, k, v = (part.unflatten(1, (HEADS, -1)).to(DTYPE) for part in self.qkv(x).chunk(3, 1))  # [T, H, D] each
        x = x + self.out(jagged_attention(q, k, v, offsets).flatten(1).float())
        k, v = (part.unflatten(1, (HEADS, -1)) for part in self.kv(x).chunk(2, 1))
        q = normalize(self.query(target).unflatten(1, (HEADS, -1)), dim=-1)  # unit rows keep |score| <= 1
        one_each = torch.arange(len(candidate) + 1, device=offsets.device)  # offsets of one query a user
        pooled = gdpa(q.to(DTYPE), normalize(k, dim=-1).to(DTYPE), v.to(DTYPE), one_each, offsets)
        return self.head(torch.cat([pooled.flatten(1).float(), target], 1)).squeeze(1)


def draw(users, generator):
    """(history, offsets, candidate, label); half of the candidates are taken from the history, where it has items."""
    lengths = torch.randint(0, 30, (users,), generator=generator)
    offsets, total = jagged.lengths_to_offsets(lengths), int(lengths.sum())
    history, candidate = (torch.randint(NUM_ITEMS, (n,), generator=generator) for n in (total, users))
    seen = (torch.rand(users, generator=generator) < 0.5) & (lengths > 0)
    where = offsets[:-1] + (torch.rand(users, generator=generator) * lengths).long()
    candidate[seen] = history[where[seen]]
    user = jagged.row_ids(offsets, total)
    label = torch.zeros(users).index_add_(0, user, (history == candidate[user]).float()).clamp_(max=1)
    return [x.to(DEVICE) for x in (history, offsets, candidate, label)]


def main(steps=300):
    torch.manual_seed(0)
    model, generator = SequenceModel().to(DEVICE), torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        history, offsets, candidate, label = draw(256, generator)
        loss = binary_cross_entropy_with_logits(model(history, offsets, candidate), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step:4d}  loss {loss.item():.3f}")
    with torch.no_grad():
        history, offsets, candidate, label = draw(4096, torch.Generator().manual_seed(2))
        accuracy = ((model(history, offsets, candidate) > 0) == (label > 0.5)).float().mean().item()
    print(f"accuracy {accuracy:.3f} on {DEVICE}; always the more frequent label: {max(p := label.mean(), 1 - p):.3f}")
    return accuracy


if __name__ == "__main__":
    main()
