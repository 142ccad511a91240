"""The parameters that torch sees in a layer whose variables are moved."""

import functools

import torch


def hook_named_parameters(original):
    """Updates layers whose variables were moved and have new parameters."""

    @functools.wraps(original)
    def named_parameters(self, *args, **kwargs):
        # The first read of a value plans the model, which makes new parameters.
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
    """Tracks the parameters of a built layer without reading `value`.

    A read of `value` plans the model, and that would be too early here.
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
