"""Several processes that draw for one training, by TorchRL's MultiSyncCollector."""
