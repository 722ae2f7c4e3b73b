"""Built-in data sets that need no download, split into reproducible and resumable batches."""

from pipefit.data.arrays import ArrayBatches, Digits, digits
from pipefit.data.corpus import split_corpus, text, unigram_entropy
from pipefit.data.generate import sample
from pipefit.data.synthetic import SyntheticBatches
from pipefit.data.windows import TextBatches
