"""Makes recipes from their names in configurations and command lines."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import reduce
from importlib import import_module
from typing import Any

from rollalloc import recipes
from rollalloc.core.recipe import Limit, Recipe, Retire
from rollalloc.recipes.shapes import Shape, Sizes, of_kinds, plain, sized
from rollalloc.rules.advantages import Deviation


@sized(recipes.dapo.shape)
def dapo_carry(
    groups: int = 16,
    n: int = 4,
    gen_groups: int | None = None,
    max_candidates: int | None = None,
    deviation: Deviation | None = None,
) -> Recipe:
    """DAPO that carries surplus groups into the next batch instead of discarding them.

    Args:
        groups: prompts in a batch, at least 1.
        n: rollouts per prompt, at least 2.
        gen_groups: number of prompts in generation at a time, at least 1. None: three times `groups`.
        max_candidates: maximum number of prompts tried for one batch. At this limit, the batch has only the
            groups that were kept by then. None: no limit.
        deviation: the kind of standard deviation, see `recipes.grpo`.

    Raises:
        ValueError: a number is out of its range.
    """
    return recipes.dapo(groups, n, gen_groups, surplus="carry", max_candidates=max_candidates, deviation=deviation)


def pilot_commit_pods(**parameters: Any) -> Recipe:
    """Pilot-Commit with PODS: trains on m rollouts of each group, the subset with the largest variance of rewards.

    Args:
        parameters: parameters of `recipes.pilot_commit` and `recipes.pods`. PODS's n must equal n_pilot + n_commit.

    Raises:
        ValueError: a parameter is unknown or not allowed, see `make_recipe`.
    """
    return make_recipe("pilot_commit+pods", parameters)


RECIPES: Mapping[str, Callable[..., Recipe]] = {
    "grpo": recipes.grpo,
    "dr_grpo": recipes.dr_grpo,
    "reinforce": recipes.reinforce,
    "rloo": recipes.rloo,
    "raft": recipes.raft,
    "spo": recipes.spo,
    "mopps": recipes.mopps,
    "foresight": recipes.foresight,
    "dapo": recipes.dapo,
    "dapo_carry": dapo_carry,
    "greso": recipes.greso,
    "knapsack": recipes.knapsack,
    "reinforce_ada": recipes.reinforce_ada,
    "vcrl": recipes.vcrl,
    "cgrpo": recipes.cgrpo,
    "pilot_commit": recipes.pilot_commit,
    "pods": recipes.pods,
    "darts": recipes.darts,
    "racing": recipes.racing,
    "pilot_commit+pods": pilot_commit_pods,
}
# A driver replaces the first kernel by the second, with its framework's kind of standard deviation.
_OWN_KERNEL, _FRAMEWORKS_KERNEL = "rollalloc.rules.advantages:grpo", "rollalloc.rules.advantages:GRPO"
# Parameters that every recipe takes by name, beside those of its function; each with its meaning.
COMMON: Mapping[str, str] = {
    "retire_at": "success rate in (0, 1] at which a prompt is retired: it is no longer drawn. None: no prompt is retired.",
    "retire_for": "number of epochs after which a retired prompt is tried again. None: never.",
    "limit_at": "share of right rollouts in (0, 1] that fit the length limit; longer rollouts are stopped. None: no limit.",
}
REQUIRED = inspect.Parameter.empty  # the default of a parameter that has none
_SAY_N = {"n_pilot", "n_commit", "sizes_S"}  # parameters that set the number of rollouts in the stages of a group


def make_recipe(name: str, parameters: Mapping[str, Any]) -> Recipe:
    """Return the recipe with this name and these parameters.

    Args:
        name: a key of `RECIPES`; or `module:object`, where the object is a recipe or a function that returns a recipe; or
            several such names joined by "+", which `recipes.mix` composes. The module is imported, so its code runs.
        parameters: arguments of the recipe function. In a mixture, each function gets the parameters that it knows. The
            stages of Pilot-Commit and racing set the number of rollouts of a group. If another part of the mixture needs
            n, it gets this number. `retire_at` and `retire_for` are accepted for every recipe function: prompts are retired
            at this success rate, for this number of epochs (`core.recipe.Retire`). `limit_at` too: rollouts are stopped at
            a length that this share of right rollouts does not exceed (`core.recipe.Limit`).

    Raises:
        ValueError: the name or a parameter is unknown, a parameter is missing, or n contradicts the stages. For an
            unknown name, the message suggests the most similar name.
    """
    refuse_unknown(name, parameters, parameters_of(name))
    parts = _parts(name)
    if len(parts) > 1 and "groups" not in parameters and "groups" in signature_of(name):
        parameters = {**parameters, "groups": signature_of(name)["groups"].default}  # the default of the first part
        if parameters["groups"] is inspect.Parameter.empty:
            raise ValueError(f"{name} needs groups; it takes {', '.join(parameters_of(name))}")
    n = group_size(name, parameters)
    if n is not None and parameters.get("n", n) != n:
        raise ValueError(
            f"{name}: its stages give a group {n} rollouts, but n is {parameters['n']!r}; leave n out, or make them equal"
        )
    # First make the parts that have no parameter n, because an error in their stages may cause errors in the other parts.
    made: dict[str, Recipe] = {}
    for part in sorted(parts, key=lambda part: "n" in _takes(parts[part])):
        takes_n = _takes(parts[part]).get("n")
        needs_n = n is not None and takes_n is not None and takes_n.default is takes_n.empty
        made[part] = _made(part, parts[part], {**parameters, "n": n} if needs_n else parameters)
    mixed = reduce(recipes.mix, [made[part] for part in parts])
    return _limited(_retiring(mixed, parameters), parameters.get("limit_at"))


def _retiring(recipe: Recipe, parameters: Mapping[str, Any]) -> Recipe:
    """The recipe with the common parameters `retire_at` and `retire_for`."""
    level, epochs = parameters.get("retire_at"), parameters.get("retire_for")
    if level is None and epochs is not None:
        raise ValueError(
            f"retire_for={epochs} needs retire_at, the success rate from which a prompt is retired, such as 0.9"
        )
    if level is None:
        return recipe
    if isinstance(level, bool) or not isinstance(level, (int, float)):
        raise ValueError(f"retire_at must be a success rate in (0, 1], got {level!r}")
    try:
        return recipe.replace(retire=Retire(level=level, epochs=epochs))
    except ValueError as error:
        raise ValueError(f"retire_at={level}, retire_for={epochs}: {error}") from None


def _limited(recipe: Recipe, share: Any) -> Recipe:
    """The recipe with the common parameter `limit_at`."""
    if share is None:
        return recipe
    if isinstance(share, bool) or not isinstance(share, (int, float)):
        raise ValueError(f"limit_at must be a share of right rollouts in (0, 1], got {share!r}")
    try:
        return recipe.replace(limit=Limit(share=share))
    except ValueError as error:
        raise ValueError(f"limit_at={share}: {error}") from None


def sizes_of(
    name: str, given: Mapping[str, Any], rows: int | None = None, group_rows: int | None = None
) -> dict[str, Any]:
    """The sizes of a recipe, as the `shape` of its function gives them, with the sizes that the user set.

    In a mixture, a method that trains on a part of its rollouts (PODS) says how many the others generate. A method of one
    rollout per prompt follows the others.

    Args:
        name: see `make_recipe`.
        given: the parameters that the user set.
        rows: rows of a batch. None: the method's own default. A user's own function without a shape then has no sizes.
        group_rows: rows of a group; None as for `rows`.

    Raises:
        ValueError: the name is unknown, a parameter has a wrong kind, or the method has no groups of so few rows.
    """
    _refuse_other_kinds(name, given)
    asked = {key: value for key, value in (("rows", rows), ("group_rows", group_rows)) if value is not None}
    shapes: list[Shape] = [
        getattr(made, "shape", plain)
        for made in _parts(name).values()
        if not isinstance(made, Recipe) and (asked or hasattr(made, "shape"))
    ]
    fits: list[Sizes] = []
    for shape in sorted(shapes, key=lambda shape: "n" not in _takes(shape)):
        own = shape(**asked, **{key: given[key] for key in _takes(shape) if given.get(key) is not None})
        if "n" in _takes(shape):
            asked = {"rows": own["groups"] * own["n"], "group_rows": own["n"]}
        fits.append(own)
    known = signature_of(name)
    found: dict[str, Any] = {}
    for own in sorted(fits, key=lambda own: own.get("n") != 1):
        found |= {key: given.get(key, value) for key, value in own.items() if key in known}
    if _SAY_N & found.keys():
        found.pop("n", None)  # the stages say it
    return found


def in_shape(name: str, parameters: Mapping[str, Any], rows: int, group_rows: int, **said: int) -> Recipe:
    """Return the recipe of this name with the sizes of a framework's batch, except for sizes that the user set.

    Args:
        name: see `make_recipe`.
        parameters: the parameters that the user set.
        rows: the framework's number of rows in a batch.
        group_rows: the framework's number of rows of a prompt.
        said: sizes that the framework itself sets, such as verl's `groups` and `n`.

    Raises:
        ValueError: a name or a parameter is not allowed, see `make_recipe`.
    """
    return make_recipe(name, {**sizes_of(name, {**said, **parameters}, rows, group_rows), **parameters})


def _refuse_other_kinds(name: str, parameters: Mapping[str, Any]) -> None:
    """Raise a ValueError if a parameter has another kind than its recipe function says."""
    for made in _parts(name).values():
        if not isinstance(made, Recipe) and hasattr(made, "shape"):
            of_kinds(made, {key: value for key, value in parameters.items() if key in _takes(made)})


def signature_of(name: str) -> Mapping[str, inspect.Parameter]:
    """The parameters of the recipe function with this name, with their defaults. Empty if the name stands for
    a finished recipe.

    Raises:
        ValueError: the name is unknown; the message suggests the most similar name.
    """
    taken: dict[str, inspect.Parameter] = {}
    for made in _parts(name).values():
        for key, parameter in _takes(made).items():
            taken.setdefault(key, parameter)
    if "n" in taken and _SAY_N & taken.keys():
        taken["n"] = taken["n"].replace(default=None)  # None: use the number that the stages set
    if taken:
        for key in COMMON:
            taken.setdefault(key, inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=None))
    return taken


def defaults_of(name: str) -> dict[str, Any]:
    """The default of each parameter of a recipe, sizes as its `shape` gives them. `REQUIRED` if there is no default.

    Raises:
        ValueError: the name is unknown.
    """
    return {key: parameter.default for key, parameter in signature_of(name).items()} | sizes_of(name, {})


def functions_of(name: str) -> Mapping[str, Recipe | Callable[..., Any]]:
    """The recipe or recipe function of each part of a name. Parts are joined by "+".

    Raises:
        ValueError: the name is unknown.
    """
    return _parts(name)


def parameters_of(name: str) -> tuple[str, ...]:
    """The names of the parameters of the recipe with this name.

    Raises:
        ValueError: the name is unknown.
    """
    return tuple(signature_of(name))


def group_size(name: str, parameters: Mapping[str, Any]) -> int | None:
    """The number of rollouts of a group, for a mixture whose stages set this number while another of its recipes needs n.

    None for other names.

    Raises:
        ValueError: the name is unknown.
    """
    known = signature_of(name)
    if "n" not in known or not _SAY_N & known.keys():
        return None
    said = {key: parameters.get(key, known[key].default) for key in _SAY_N & known.keys()}
    sizes = said.pop("sizes_S", ())
    numbers: list[Any] = [*(sizes[-1:] if isinstance(sizes, (list, tuple)) else [sizes]), *said.values()]
    return sum(numbers) if all(type(each) is int for each in numbers) else None


def standard(name: str) -> str:
    """Return the key of `RECIPES` with the same parts in any order. If there is none, return the name itself."""
    parts = sorted(part.strip() for part in name.split("+"))
    return next((each for each in RECIPES if sorted(each.split("+")) == parts), name)


def refuse_unknown(name: str, parameters: Iterable[str], known: Iterable[str]) -> None:
    """Raise an error if a parameter is not known.

    Raises:
        ValueError: a parameter is not known. The message suggests the most similar known parameter.
    """
    known = list(known)
    for parameter in parameters:
        if parameter not in known:
            takes = f"it takes {', '.join(known)}" if known else "it is a recipe, which takes none"
            raise ValueError(f"{name} has no parameter {parameter!r}{near(parameter, known)}; {takes}")


def _made(name: str, made: Recipe | Callable[..., Any], parameters: Mapping[str, Any]) -> Recipe:
    if isinstance(made, Recipe):
        return made
    known = _takes(made)
    missing = [key for key, p in known.items() if p.default is p.empty and key not in parameters]
    if missing:
        raise ValueError(f"{name} needs {', '.join(missing)}; it takes {', '.join(known)}")
    recipe = made(**{key: parameters[key] for key in known if key in parameters})
    if not isinstance(recipe, Recipe):
        raise ValueError(f"{name} must return a Recipe, got {recipe!r}")
    return recipe


def _takes(made: Recipe | Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    if isinstance(made, Recipe):
        return {}
    try:
        return inspect.signature(made).parameters
    except ValueError as error:  # some built-in functions have no signature
        raise ValueError(f"expected a Recipe or a function that returns one, got {made!r} ({error})") from error


def _parts(name: str) -> dict[str, Recipe | Callable[..., Any]]:
    """The parts of a name that are joined by "+"."""
    return {part: _find(part) for part in map(str.strip, name.split("+"))}


def _find(name: str) -> Recipe | Callable[..., Any]:
    if ":" not in name:
        if name not in RECIPES:
            raise ValueError(
                f"unknown recipe {name!r}{near(name, RECIPES)}; there are {', '.join(RECIPES)}, "
                "several of these joined by '+', or module:object"
            )
        return RECIPES[name]
    module, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), attribute)):
        raise ValueError(f"recipe {name!r}: expected package.module:object with Python names")
    try:
        made = getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise ImportError(f"recipe {name}: {error}; install it, or run from the folder that holds it") from error
    except AttributeError as error:
        raise AttributeError(f"recipe {name}: {error}; check the name after the colon") from error
    except ImportError:  # its message is clear enough
        raise
    except (Exception, SystemExit) as error:
        raise ImportError(
            f"recipe {name}: its module raises {type(error).__name__} when it is imported: {error}"
        ) from error
    if not isinstance(made, Recipe) and not callable(made):
        raise ValueError(f"{name} must be a Recipe or a function that returns one, got {made!r}")
    return made


# Names in the released code of Pilot-Commit, DAPO, PODS and DARTS, and in the frameworks; each with ours.
_RELEASED = {
    "agg_metric": "metric",
    "buffer_max_off_steps": "max_staleness",
    "buffer_response_sampling_method": "effective",
    "buffer_sampling_method": "promote",
    "diversity_threshold_lower": "p_lower",
    "diversity_threshold_upper": "p_upper",
    "exclude_threshold_upper": "p_solve",
    "gen_batch_size": "gen_groups",
    "max_num_gen_batches": "max_candidates",
    "max_off_steps": "max_staleness",
    "n_explore": "n_pilot",
    "num_generations": "n",
    "pods_full_size": "n",
    "prompt_sampling_strategy": "promote",
    "redundancy": "max_redundancy",
    "train_batch_size": "groups",
}


def near(word: str, known: Iterable[str]) -> str:
    """A suggestion to put behind an unknown name, such as " (did you mean 'grpo'?)"; empty if no known name is similar."""
    known = list(known)
    released = _RELEASED.get(word.rpartition(".")[2])
    if released in known:
        return f" ({released!r} is our name for it)"
    in_any_case = {name.casefold(): name for name in known}
    close = get_close_matches(word.casefold(), in_any_case, n=1)
    return f" (did you mean {in_any_case[close[0]]!r}?)" if close else ""


def name_of(description: Any) -> str | None:
    """The key of `RECIPES` whose recipe has the same rules as a described recipe. Numbers, replay and `retire` may differ.

    Args:
        description: `Recipe.description`, for example from a saved state. None: it is not known.

    Returns:
        The first such name; None if there is none, as for a recipe of the user's own.
    """
    if description is None:
        return None
    # Parameters that are off by default.
    rules = _rules_in({**description, "retire": None, "replay": None, "limit": None})
    return next((name for name in RECIPES if _rules_in(make_recipe(name, {}).description) == rules), None)


def _rules_in(described: Any) -> Any:
    """The types in a described recipe. Stages that differ only in numbers count once, as in racing with more sizes."""
    if isinstance(described, Mapping):
        if described.get("is") == _FRAMEWORKS_KERNEL:
            return _OWN_KERNEL
        return {name: rules for name, value in described.items() if (rules := _rules_in(value))}
    if isinstance(described, list):
        each = [rules for value in described if (rules := _rules_in(value))]
        return [rules for at, rules in enumerate(each) if rules not in each[:at]]
    return described if isinstance(described, str) and ":" in described else None
