"""Model files: readers and writers, tensor names, and `WeightSource`, where models get their weights."""
