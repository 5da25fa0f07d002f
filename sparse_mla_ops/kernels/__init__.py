"""Device code: `@triton.jit` functions only. Who launches them, with what, is the backends' business."""
