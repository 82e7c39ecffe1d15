"""Linear layers of a model made to run in fp8. Works alone, in a loop of one's own:

recipe = resolve(Fp8Config(scaling="delayed"), backend.capabilities(chip, software), backend.name)
state = convert(model, recipe, backend.matmul)     # before the model is sharded
...                                                # shard it
state.start(device)
for batch in data:
    ...                                            # forward, backward, optimizer.step()
    state.update()

On several ranks ``start`` and ``update`` need ``largest``, which reduces a tensor to the elementwise largest of all of
them: delayed scales and those of gathered weights are right only where all ranks hold the same. ``state.state()`` is
for checkpoints; after reading one, call ``state.restored(largest, histories=True)``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import Tensor, nn

from accelbridge import ops
from accelbridge.backend import Matmul
from accelbridge.models.decoder import Linear
from accelbridge.precision.filters import choose
from accelbridge.precision.linear import Fp8Layer
from accelbridge.precision.recipe import Fp8Recipe
from accelbridge.precision.state import Fp8State


class Fp8Linear(nn.Linear):
    """A linear layer on :func:`accelbridge.ops.fp8_linear`. Made of one by :func:`convert`, in place."""

    fp8: Fp8Layer

    def forward(self, input: Tensor) -> Tensor:
        return ops.fp8_linear(input, self.weight, self.bias, self.fp8)


def linears(model: nn.Module) -> dict[str, tuple[int, int]]:
    """(out, in) by name of the modules that are the semantic op ``linear`` with a weight of their own, and no more.
    A head that is tied to an embedding is none: a weight that is gathered as codes could not be looked up in."""
    kinds = (nn.Linear.forward, Linear.forward)
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    return {
        name: (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and type(module).forward in kinds and owners[id(module.weight)] == 1
    }


def convert(model: nn.Module, recipe: Fp8Recipe, matmul: Matmul, chosen: Iterable[str] | None = None) -> Fp8State:
    """Make linear layers of ``model`` compute in fp8: those that ``chosen`` names, default: what the recipe's filters
    leave. Parameters and their names stay. Raises ConfigError where the filters leave none."""
    names = choose(linears(model), recipe.config).chosen if chosen is None else chosen
    layers: dict[str, tuple[nn.Linear, Fp8Layer]] = {}
    for name in names:
        module = model.get_submodule(name)
        assert isinstance(module, nn.Linear), name
        layer = Fp8Layer(name, matmul, recipe)
        module.__class__ = Fp8Linear
        vars(module)["fp8"] = layer  # neither a tensor nor a module
        layers[name] = module, layer
    return Fp8State(model, layers, recipe)
