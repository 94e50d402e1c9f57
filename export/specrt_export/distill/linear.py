"""Where an EAGLE-1 head begins: the linear map that guesses a text's next feature best, in closed form."""

import torch

from specrt_export.distill.data import Dataset, batches
from specrt_export.distill.head import Head

_ROWS = 200_000  # a few hundred per unknown of an output
_RIDGE = 1e-4  # of the mean square of each input
_BATCH = 4096  # tokens


def begin_linear(head: Head, dataset: Dataset) -> None:
    """Set fc to the least-squares map of (embedding of token i + 1, feature of token i) to the feature of token i + 1.

    The layer after it learns what is left: short trainings get further, for which most updates would go into this map.
    """
    size = head.fc.in_features + 1
    squares, products = torch.zeros(size, size).double(), torch.zeros(size, head.fc.out_features).double()
    rows = 0
    for batch in batches(dataset, num_tokens=_BATCH):
        use = batch.weights > 0
        wanted = batch.wanted[use].float()
        given = torch.cat([batch.embeddings[use].float(), batch.features[use].float(), torch.ones(len(wanted), 1)], 1)
        squares += given.T @ given
        products += given.T @ wanted
        rows += len(wanted)
        if rows >= _ROWS:
            break
    ridge = _RIDGE * squares.diagonal()
    ridge[-1] = 0.0
    solution = torch.linalg.lstsq(squares + ridge.diag(), products).solution.float()
    with torch.no_grad():
        head.fc.weight.copy_(solution[:-1].T)
        head.fc.bias.copy_(solution[-1])
