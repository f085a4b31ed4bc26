"""Adaptive input and softmax: frequency bands of the vocabulary, narrower embeddings for rare words, tied in both.

    input    x(w) = P_b E_b[w],                                          b: band of w, E_b [words, width / factor^b]
    softmax  p(w) = softmax([E_0 P_0^T h; C h])[w]                       first band; C h: logits of the other bands
             p(w) = softmax([E_0 P_0^T h; C h])[band b] softmax(E_b P_b^T h)[w]

Source: Baevski and Auli 2019, sections 3 and 4, in fairseq's form: every band is projected, embeddings and projections are tied.
Words must be numbered by frequency (dataset.order=frequency).
"""

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class AdaptiveVocabulary(nn.Module):
    """Embedding and softmax of a vocabulary in bands.

    Args:
        vocabulary: V.
        width: size of the network's hidden vectors.
        cutoffs: first word of each band except the first.
        factor: ratio of the embedding widths of consecutive bands.
        dropout: dropout of the projected vectors before the softmax of a rare band.
    """

    def __init__(self, vocabulary: int, width: int, cutoffs: Sequence[int], factor: int, dropout: float) -> None:
        super().__init__()
        self.width, self.dropout = width, dropout
        self.edges = [0, *cutoffs, vocabulary]
        sizes = [
            (end - start, width // factor**band) for band, (start, end) in enumerate(itertools.pairwise(self.edges))
        ]
        self.embeddings = nn.ParameterList(torch.empty(words, narrow) for words, narrow in sizes)
        self.projections = nn.ParameterList(torch.empty(width, narrow) for _, narrow in sizes)
        self.clusters = nn.Parameter(torch.empty(len(cutoffs), width))
        for embedding in self.embeddings:
            nn.init.normal_(embedding, 0, embedding.shape[1] ** -0.5)
        for weight in (*self.projections, self.clusters):
            nn.init.xavier_uniform_(weight)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [..., width] of tokens; every band is computed for all tokens, so no shape depends on values."""
        x: Tensor | float = 0.0
        for band, (start, end) in enumerate(itertools.pairwise(self.edges)):
            inside = ((tokens >= start) & (tokens < end)).unsqueeze(-1)
            rows = F.embedding((tokens - start).clamp(0, end - start - 1), self.embeddings[band])
            x = x + F.linear(torch.where(inside, rows, 0), self.projections[band])
        assert isinstance(x, Tensor)
        return x

    def _head(self, h: Tensor) -> Tensor:
        """Log probabilities of the first band's words and of the other bands, [M, words + bands - 1]."""
        words = F.linear(F.linear(h, self.projections[0].T), self.embeddings[0])
        return torch.cat([words, F.linear(h, self.clusters)], dim=1).log_softmax(1)

    def _tail(self, h: Tensor, band: int) -> Tensor:
        """Log probabilities of a rare band's words, given the band, [M, words]."""
        narrow = F.dropout(F.linear(h, self.projections[band].T), self.dropout, self.training)
        return F.linear(narrow, self.embeddings[band]).log_softmax(1)

    def log_probabilities(self, h: Tensor) -> Tensor:
        """Log probabilities of all words, [M, V] from h [M, width]."""
        head, first = self._head(h), self.edges[1]
        tails = [self._tail(h, band) + head[:, first + band - 1, None] for band in range(1, len(self.embeddings))]
        return torch.cat([head[:, :first], *tails], dim=1)

    def losses(self, h: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """-log p(target) [M], and whether the target is the most probable word of the most probable band [M].

        Logits of a band are computed only for targets in that band, about a tenth of the work for typical frequencies.
        """
        head, first = self._head(h), self.edges[1]
        slot = targets.clone()  # target class in the head: the word itself, or its band
        for band, (start, end) in enumerate(itertools.pairwise(self.edges)):
            if band:
                slot = torch.where((targets >= start) & (targets < end), first + band - 1, slot)
        losses = -head.gather(1, slot.unsqueeze(1)).squeeze(1)
        right = head.argmax(1) == slot
        for band, (start, end) in enumerate(itertools.pairwise(self.edges)):
            if not band:
                continue
            members = ((targets >= start) & (targets < end)).nonzero().flatten()
            tail, word = self._tail(h[members], band), (targets[members] - start)
            losses = losses.index_add(0, members, -tail.gather(1, word.unsqueeze(1)).squeeze(1))
            right = right.index_put((members,), right[members] & (tail.argmax(1) == word))
        return losses, right
