"""x"""
import torch
from torch import Tensor
def cvar(accuracy, latency_ms, budget_ms, knobs):
    late = (latency_ms / budget_ms - 1).clamp_min(0)
    return accuracy - 0.1 * (0.5 + (late - 0.5).clamp_min(0) / 0.05)
def growing(accuracy, latency_ms, budget_ms, knobs):
    late = (latency_ms / budget_ms - 1).clamp_min(0)
    return accuracy - 0.5*late - late**2
def floor(accuracy, latency_ms, budget_ms, knobs):
    return (accuracy >= 0.8).float() - 0.3 * (latency_ms / budget_ms).clamp_max(3)
def squaredmiss(accuracy, latency_ms, budget_ms, knobs):
    return accuracy*(latency_ms<=budget_ms) - 0.3 * (latency_ms>2*budget_ms)
