"""docs/commands.md and docs/recipes.md are made from the code, and are those of today's code."""

from test_tools import tool


def test_the_reference_is_that_of_the_code():
    assert tool("reference").differing() == []


def test_every_command_and_recipe_is_in_the_reference():
    reference = tool("reference")
    commands, recipes = reference.commands(), reference.recipes()
    for name in ("train", "compare", "report", "advise", "waste", "data convert", "features", "model", "recipes"):
        assert f"## rollalloc {name}\n" in commands
    assert all(f"\n## {name}\n" in recipes for name in reference.RECIPES)
    assert "| `n_pilot` | `4` |" in recipes
    assert "| `retire_at` | success rate" in recipes


def test_no_parameter_of_a_recipe_lacks_its_meaning():
    rows = [line for line in tool("reference").recipes().splitlines() if line.startswith("| `")]
    assert len(rows) > 100
    assert [row for row in rows if row.endswith("|  |")] == []
