"""Built-in data sets that need no download, cut into reproducible and resumable batches."""

from pipefit.data.corpus import split_corpus, text, unigram_entropy
from pipefit.data.generate import sample
from pipefit.data.windows import TextBatches

__all__ = ["TextBatches", "sample", "split_corpus", "text", "unigram_entropy"]
