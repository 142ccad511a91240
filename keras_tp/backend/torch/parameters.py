"""The parameters that torch finds in the layers of a model."""

import functools

import torch


def hook_named_parameters(original):
    """A variable that was moved has a new parameter; its layers learn it."""

    @functools.wraps(original)
    def named_parameters(self, *args, **kwargs):
        # A model is planned, and has new parameters, before a value is read.
        for variable in getattr(self, "variables", ()):
            _ = variable.value
        for module in self.modules():
            held = module._modules.get("_torch_params")
            if held is None or not hasattr(module, "variables"):
                continue
            if any(
                held[variable.path] is not variable._value
                for variable in module.variables
                if variable.path in held
            ):
                module._track_variables()
        return original(self, *args, **kwargs)

    return named_parameters


def hook_track_variables(original):
    """Keras notes the parameters of a layer that it has built.

    A model is planned before a value is read, but this is no use of it.
    """

    @functools.wraps(original)
    def _track_variables(self):
        if all(variable._layout is None for variable in self.variables):
            original(self)
            return
        self._torch_params = torch.nn.ParameterDict(
            {variable.path: variable._value for variable in self.variables}
        )

    return _track_variables
