"""Kernels in Triton for operators that memory bounds: each reads its operands and writes its results once, in
one launch, whatever torch would compose it of.

Every module here holds kernels and the functions that launch them. Their callers in `ops/` are operators of
torch: each has a fake, and a reference in torch that says what the kernel computes and runs wherever the
kernel does not. Nothing outside `ops/` imports this package.
"""
