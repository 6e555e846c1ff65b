"""What teaches a controller: predictors of accuracy and latency, their weights, distillation."""
