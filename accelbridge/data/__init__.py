"""Token stores and resumable loaders.

In the order that data passes through them: ``source`` finds documents, ``tokenizer`` turns text into ids,
``build`` writes them into a ``store`` (described by ``index``), ``order`` shuffles sample numbers and
``loader`` deals them out to ranks. Only ``loader`` imports torch.
"""
