"""What a linear layer costs. The layer itself is megatron-core's or torch's."""


def linear_flops(tokens: int, inputs: int, outputs: int) -> int:
    """Forward FLOPs of a linear layer."""
    return 2 * tokens * inputs * outputs


def linear_bytes(tokens: int, inputs: int, outputs: int, element: int) -> int:
    """Bytes that a linear layer must read and write: its weight, its input and its output, once each."""
    return (inputs * outputs + tokens * (inputs + outputs)) * element
