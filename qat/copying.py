"""Copies of tensors that are made while the device goes on."""

import torch
from torch import Tensor


class Copying:
    """Copies of tensors on the host, made on a stream of their own if the tensors are a GPU's."""

    def __init__(self, device: torch.device, tensors: list[Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type != "cuda":
            self.copies = [tensor.clone() for tensor in tensors]
            return
        self._sources = tensors  # whose memory must not be given away before the end
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            self.copies = [
                tensor.to("cpu", non_blocking=True) if tensor.is_cuda else tensor.clone()
                for tensor in tensors
            ]
        self._event = stream.record_event()

    def hold(self) -> None:
        """Let the device's later work begin after the copies; the host does not wait."""
        if self._event is not None:
            self._event.wait()

    def wait(self) -> None:
        """Wait on the host, in any thread, until the copies can be read."""
        if self._event is not None:
            self._event.synchronize()
            self._sources = []
