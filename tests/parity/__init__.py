"""The parity table: what every layout does to the numbers of one training run.

    python -m tests.parity              measure every row that this environment can run, write docs/parity.md

Every row trains the same small decoder in float32 from the same seed, without a seed checkpoint, and is compared
with one device:

    loss       20 free-running steps, largest relative difference
    norm       global gradient norm at steps 1, 6, 11 and 16, each from the reference's weights (teacher-forced)
    gradient   every tensor's gradient at those steps, ||ours - reference|| / ||reference||, the largest; a tensor
               smaller than a thousandth of the whole gradient is what is left of terms that cancel, and is compared
               with that thousandth; one that differs by more than its bound is also held to the envelope
    free norm  norms of the 20 free-running steps, as a multiple of the envelope
    weights    every tensor after 20 steps, as a multiple of the envelope
    same       resumed at step 10 on the same layout: losses and all state bitwise equal to the unbroken run
    moved      resumed at step 10 from the checkpoint of another row: losses 11 to 20 against the reference

The envelope is what the order of sums alone does to one device: the largest deviation among runs whose batch rows,
attention heads, feed-forward units and residual dimensions are permuted, which changes no sum but its order.

``rows`` says what is run, ``measure`` runs it, ``envelope`` and ``compare`` make cells of it, ``faults`` are
deliberate ones that the table has to show, and ``table`` keeps the results.
"""
