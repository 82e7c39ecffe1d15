"""Number formats narrower than float32: as data (``formats.py``), and tensors that are kept in them with scales
(``quantized.py``). Arithmetic on them is a backend's: ``Matmul.quantize`` and ``Matmul.scaled_mm``.
"""
