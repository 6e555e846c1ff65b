"""metrics.csv, TensorBoard, and Weights & Biases."""
