"""Finding answers in completions, and comparing them as text, as numbers and as mathematics."""

import importlib.util
import sys
from fractions import Fraction
from pathlib import Path
from threading import Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollalloc.rewards.answers import ExactMatch, Numeric, exact, numeric
from rollalloc.rewards.extract import Pattern, after_hashes, boxed, final
from rollalloc.rewards.function import Sample, Scored, Unscored, load_reward, score_sample


@pytest.fixture
def math():
    return pytest.importorskip("rollalloc.rewards.math", exc_type=ImportError)


RIGHT, WRONG = Scored(1.0, 1.0), Scored(0.0, 0.0)


def ask(function, completion, ground_truth):
    return score_sample(function, Sample("test", completion, ground_truth, {}))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1}, no, \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\left\{ 1 \right.}", r"\left\{ 1 \right."),
        (r"\boxed{\\{2}}", r"\\{2}"),
        (r"\boxed{}", ""),
        (r"\boxed{1", None),
        (r"\boxed{1} \boxed{2", None),
        (r"\boxed {42}", "42"),
        (r"\boxed{\boxed{4}}", "4"),
        ("42", None),
        (r"so \fbox{17}.", "17"),
        (r"\fbox{\boxed{5}}", "5"),
        (r"\boxed{6}, no, \fbox{9}", "9"),
        (r"\fbox{9}, no, \boxed{6}", "6"),
        (r"\fbox{9}, no, $\boxed 6$. We had 3 cases.", "6"),
        (r"\boxed{6} or \fbox{9", None),
        (r"$\boxed8$", "8"),
        (r"Hence \boxed -3.5, as claimed.", "-3.5"),
        (r"Hence $\boxed \frac{\sqrt{5}}{2}$.", r"\frac{\sqrt{5}}{2}"),
        (r"It is \boxed (C) of these", "(C)"),
        (r"\(\boxed 5\)", "5"),
        # The command alone is no box.
        (r"\boxed{6}, as asked in \boxed form", "6"),
        (r"\boxed{6} (in \boxed), \boxedtext", "6"),
        ("\\boxed\n7", None),
    ],
)
def test_the_answer_in_the_last_box_counts(text, answer):
    assert boxed(text) == answer


@given(
    st.recursive(st.text("ab", max_size=3), lambda inner: st.lists(inner).map(lambda parts: f"{{{''.join(parts)}}}"))
)
def test_a_box_holds_whatever_is_balanced(content):
    assert boxed(f"first \\boxed{{x}} then \\boxed{{{content}}} }}") == content


@pytest.mark.parametrize(
    ("text", "answer"),
    [("1 + 1 = 2\n#### 2\n", "2"), ("#### 1 #### 1,000 \n more", "1,000"), ("####", ""), ("# 2", None)],
)
def test_the_extractor_finds_the_answer_after_gsm8ks_hashes(text, answer):
    assert after_hashes(text) == answer


def test_the_final_answer_prefers_the_box():
    assert final(r"\boxed{1} #### 2") == "1"
    assert final("so #### 2") == "2"
    assert final("two") == "two"


def test_a_pattern_takes_its_last_match():
    text = "Answer: yes\nAnswer: no"
    assert Pattern(r"Answer: (\w+)")(text) == "no"
    assert Pattern(r"Answer: \w+")(text) == "Answer: no"
    assert Pattern(r"Answer: (\d+)")(text) is None


def test_multiple_choice_takes_letters_of_ones_own():
    """The pattern of the guide."""
    choice = ExactMatch(Pattern(r"(?i:answer)(?:\W|is\b|\\boxed|\\text)*([A-D])\b"))
    assert ask(choice, "The answer is (A) ... no, the answer is B", "B") == RIGHT
    for text in ("**C**", "is: C", "is **C**.", ": (C)", r"is $\boxed{C}$", r"is $\boxed{\text{C}}$"):
        assert ask(choice, f"The answer {text}", "C") == RIGHT
    assert ask(choice, "B", "B") == WRONG
    assert ask(choice, "The answer is Definitely B", "B") == WRONG


@pytest.mark.parametrize(
    ("function", "completion", "ground_truth", "outcome"),
    [
        (exact, r"\boxed{New   York}", "New York ", RIGHT),
        (exact, "#### Paris", "Paris", RIGHT),
        (exact, "Paris", "paris", WRONG),
        (exact, "7", 7, RIGHT),
        (exact, r"\boxed{NewYork}", "New York", WRONG),
        (numeric, "He has 18 apples. #### 18", "18", RIGHT),
        (numeric, r"\boxed{1,234.50}", "1234.5", RIGHT),
        (numeric, r"$\boxed{\$5}$", "5", RIGHT),
        (numeric, r"\boxed{-\frac{3}{4}}", "-0.75", RIGHT),
        (numeric, "6/8", "0.75", RIGHT),
        (numeric, r"\boxed{1.5 \times 10^{3}}", "1500", RIGHT),
        (numeric, r"\boxed{50\%}", "0.5", RIGHT),
        (numeric, r"\boxed{50\%}", "50", RIGHT),
        (numeric, r"\boxed{50\%}", "50%", RIGHT),
        (numeric, r"\boxed{0.5\%}", "50%", WRONG),
        (numeric, "−7", -7, RIGHT),
        (numeric, "5 - 3", "3", RIGHT),  # a difference, not a negative number
        (numeric, "1000001", "1000000", WRONG),
        (numeric, "18 or 19", "18", WRONG),
        (numeric, "10^3", "10", WRONG),
        (numeric, "x2", "2", WRONG),
        (numeric, "1e999999999", "1", WRONG),
        (numeric, "1/0", "1", WRONG),
        (numeric, "9" * 100_000, "9", WRONG),
        (numeric, "٤٢", "42", WRONG),  # digits of other scripts
        # After the hashes, the first sentence is the answer.
        (exact, "#### St. Petersburg", "St. Petersburg", RIGHT),
        (numeric, "#### 42. We checked it 3 times.", "42", RIGHT),
        (numeric, "#### 5 apples. They cost 3.", "5", RIGHT),
        (numeric, "#### 1.5", "1.5", RIGHT),
        (numeric, "#### 42.", "42", RIGHT),
        # A box of any kind comes before what follows it.
        (numeric, r"So \fbox{17}. This took 3 steps.", "17", RIGHT),
        (numeric, r"The sum is $\boxed 8$. There were 3 cases.", "8", RIGHT),
        (numeric, r"The sum is $\boxed 8$. There were 3 cases.", "3", WRONG),
        (numeric, "\\fbox{17}\n#### Check of all 3 cases", "17", RIGHT),
        (exact, r"\fbox{Paris} is nice", "Paris", RIGHT),
    ],
)
def test_text_is_compared_exactly_and_numbers_by_value(function, completion, ground_truth, outcome):
    assert ask(function, completion, ground_truth) == outcome


@pytest.mark.parametrize(
    ("answer", "ground_truth", "outcome"),
    [
        *[(rf"9{separator}500", "9500", RIGHT) for separator in (",", "{,}", r"\,", r"\!", r",\!", r"\ ", "\u202f")],
        ("9{,}500", "500", WRONG),
        ("10000", r"10,\!000", RIGHT),
        (r"11,\! 111,\! 100", "11111100", RIGHT),
        (r"90^\circ", "90", RIGHT),
        (r"90^{\circ}", "90", RIGHT),
        ("90°", r"90^\circ", RIGHT),
        (r"3\frac{1}{2}", "3.5", RIGHT),
        (r"-3\frac{1}{2}", "-3.5", RIGHT),
        (r"3\frac{1}{2}", "2", WRONG),
        ("3 1/2", "3.5", RIGHT),
        ("3 1/2", "0.5", WRONG),
        ("3 4/2", "2", RIGHT),  # no mixed number
        (r"\frac12", "0.5", RIGHT),
        (r"\tfrac{270}7", "270/7", RIGHT),
        ("- 5", "-5", RIGHT),
        (r"x = - \frac12", "-0.5", RIGHT),
        (r"-\$5", "-5", RIGHT),
        (r"\$-5", "-5", RIGHT),
        ("4.5e33", r"4.5 \times 10^{33}", RIGHT),
        ("2 × 10³", "2000", RIGHT),
        ("10^{-7}", "1e-7", RIGHT),
        ("x^{-3}", "3", WRONG),
        (r"0.\overline{6}", "2/3", RIGHT),
        (r"-1.2\overline{3}", "-37/30", RIGHT),
        (r"0.\bar 6", "2/3", RIGHT),
        (r"0.\dot{6}", "2/3", RIGHT),
        (r"0.\dot{4}2857\dot{1}", "3/7", RIGHT),
        ("0.(27)", "3/11", RIGHT),
        (r"1,234.\overline{5}", "11111/9", RIGHT),
        (r"66.\overline{6}\%", "2/3", RIGHT),
        (r"0.\overline{9}", "1", RIGHT),
        (r"0.\overline{6}", "6", WRONG),
        (r"0.0\overline{6}", "2/3", WRONG),
    ],
)
def test_a_number_is_recognised_in_every_spelling(answer, ground_truth, outcome):
    assert ask(numeric, f"so \\boxed{{{answer}}}", ground_truth) == outcome


@pytest.mark.parametrize("truncated", [r"\boxed{42", r"\boxed{41} or rather \boxed{42", "#### 42 \\boxed{4"])
def test_a_box_that_is_not_closed_is_no_answer(truncated):
    assert ask(numeric, truncated, "42") == ask(exact, truncated, "42") == WRONG
    assert ask(numeric, truncated, "41") == WRONG


@given(st.integers(-(10**12), 10**12), st.integers(1, 10**6))
def test_a_fraction_is_its_own_value_however_written(above, below):
    truth = f"{above}/{below}"
    assert ask(numeric, f"so {truth}.", truth) == RIGHT
    assert ask(numeric, f"\\boxed{{\\frac{{{above}}}{{{below}}}}}", truth) == RIGHT
    assert ask(numeric, f"{above:,}/{below:,}", truth) == RIGHT
    assert ask(numeric, f"{above + below}/{below}", truth) == (RIGHT if abs(Fraction(above, below)) >= 10**9 else WRONG)


def test_numbers_within_the_tolerance_are_equal():
    assert ask(numeric, "3.14", "3.14159") == WRONG
    assert ask(Numeric(relative=0.01), "3.14", "3.14159") == RIGHT
    assert ask(Numeric(absolute=0.01, relative=0), "3.14", "3.14159") == RIGHT
    assert ask(Numeric(absolute=0.001, relative=0), "3.14", "3.14159") == WRONG


def test_a_ground_truth_without_a_number_is_no_wrong_answer():
    assert ask(numeric, "4", "four") == Unscored(
        "ValueError: ground truth 'four' holds no number; numeric rewards need a number"
    )


@pytest.mark.parametrize(
    ("completion", "ground_truth", "outcome"),
    [
        (r"so \boxed{\frac{1}{2}}", "0.5", RIGHT),
        (r"\boxed{1} or rather \boxed{(x+1)^2}", "x^2+2x+1", RIGHT),
        (r"\boxed{3\sqrt{2}}", r"\sqrt{18}", RIGHT),
        (r"\boxed{\{2, 1\}}", r"\{1,2\}", RIGHT),
        ("The final answer is $4$.", "$4$", RIGHT),
        (r"\boxed{5}", "4", WRONG),
        (r"\boxed{", "4", WRONG),
        ("4 \0 \ud800", "4", RIGHT),
    ],
)
def test_equal_formulas_are_right_and_others_wrong(math, completion, ground_truth, outcome):
    assert ask(math.compute_score, completion, ground_truth) == outcome


GROUND_TRUTHS = {  # forms in which public sets write them, each in another spelling and with a wrong answer
    "exponent": ("4.5e33", r"4.5 \times 10^{33}", r"4.5 \times 10^{32}"),
    "small": ("1.6e-19", r"1.6 \cdot 10^{-19}", r"9.1 \times 10^{-31}"),
    "currency": (r"\$18.90", "18.9", r"\$18.80"),
    "thousands": (r"\$32,\!348", "32{,}348", r"32,\!384"),
    "groups": (r"11,\! 111,\! 100", "11111100", r"111,\! 111,\! 100"),
    "unit": (r"864 \mbox{ inches}^2", "864", r"846 \mbox{ inches}^2"),
    "degrees": (r"90^\circ", "90", r"80^\circ"),
    "degrees in words": (r"\frac{270}7\text{ degrees}", r"\dfrac{270}{7}", r"\frac{27}7"),
    "percent": (r"62.5\%", "0.625", r"6.25\%"),
    "mixed": ("11 5/6", r"\frac{71}{6}", r"1 \frac{5}{6}"),
    "improper": ("5/4", "1 1/4", "1 3/4"),
    "time": ("6:00 PM", r"6:00 \text{ p.m.}", "6:00 AM"),
    "ratio": ("3:1", "3 : 1", "1:3"),
    "ratio of three": ("1:2:3", "1 : 2 : 3", "3:2:1"),
    "base": ("1010_2", "1010_{2}", "1010_3"),
    "word": (r"\text{east}", "East", "west"),
    "anagram": ("listen", r"\text{Listen}", "silent"),
    "labels": ("DABC", r"\text{DABC}", "ABCD"),
    "ranking": (r"\text{C, A, B}", "C, A, B", "A, B, C"),
    "sentence": (r"\text{no solution}", "No solution", "one solution"),
    "choice": (r"\text{(C)}", r"\textbf{(C)} 12", r"\textbf{(D)} 12"),
    "choice with its option": (r"\textbf{(C)}\ 12", "C", "(D) 12"),
    "choice with its words": ("(C) Rome", "C: Rome", "(D) Rome"),
    "name with an initial": ("A. Einstein", "A. Einstein.", "A. Fleming"),
    "repeating": (r"\frac{5}{6}", r"0.8\overline{3}", r"0.\overline{83}"),
    "repeating within": (r"\frac{\pi}{3}", r"0.\overline{3}\pi", r"0.\overline{4}\pi"),
    "upright e": (r"\frac{\mathrm{e}+2}{\mathrm{e}}", r"1+\frac{2}{e}", r"1-\frac{2}{\mathrm{e}}"),
    "upright e by rm": (r"{\rm e}^2+1", "1+e^2", "1-e^2"),
    "upright i": (r"5-2\mathrm{i}", "-2i+5", r"5+2\mathrm{i}"),
    "upright pi": (r"3\mathrm{\pi}", r"3\pi", "3"),
    "upright logarithm": (r"3\operatorname{ln} 2", r"\ln 8", r"\ln 6"),
    "upright logarithm as text": (r"3\mathrm{ln}\, 2", r"\operatorname{ln} 8", r"\mathrm{ln} 6"),
    "upright tangent": (r"\operatorname{arctg}\frac{1}{2}", r"\arctan 0.5", r"\operatorname{ctg}\frac12"),
    "index e": (r"v_{\mathrm{e}}", "v_e", "v_i"),
    "fraction without braces": (r"\frac\pi 3", r"\pi/3", "3"),
    "root without braces": (r"\sqrt\frac12", r"\frac{\sqrt2}{2}", r"\frac12"),
    "root of a letter": (r"\frac{1}{\sqrt{n}}", r"\sqrt{1/n}", r"\sqrt{n}"),
    "root of a quotient": (r"\sqrt{1+\frac{1}{n}}", r"\frac{\sqrt{n+1}}{\sqrt{n}}", r"\frac{\sqrt{n-1}}{\sqrt{n}}"),
    "root and sign": (r"T=2\pi\sqrt{\frac{l}{g}}", r"T=\frac{2\pi\sqrt l}{\sqrt g}", r"T=-\frac{2\pi\sqrt l}{\sqrt g}"),
    "cube root": (r"\sqrt[3]{\frac{a}{b}}", r"\frac{\sqrt[3]{a}}{\sqrt[3]{b}}", r"\sqrt[3]{\frac{b}{a}}"),
    "logarithm of a quotient": (r"\ln\frac{a}{b}", r"\ln a-\ln b", r"\ln b-\ln a"),
    # Of these letters nothing says that they are positive.
    "absolute value": ("|x|", r"\sqrt{x^2}", "x"),
    "root of a square": (r"\sqrt{x^2}", "|x|", "x"),
    "logarithm of an absolute value": (r"2\ln|x|", r"2\ln\left|x\right|", r"2\ln x"),
    "unknown names": (r"\frac{1}{3} E_{1}+\frac{2}{3} E_{2}", r"\frac13E_1+\frac23E_2", r"\frac{2}{3}"),
    "box of another kind": (r"\fbox{17}", "17", "71"),
    "point": (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\pi/2)", r"(\frac{\pi}{2}, 3)"),
    "hundreds": ("(100,200,300)", "(100, 200, 300)", "(100, 300, 200)"),
    "hundreds in LaTeX": ("(2,251,252)", r"(2,\, 251,\, 252)", r"(2,\, 252,\, 251)"),
    "list": ("27,54,108,135", r"27,\, 54,\, 108,\, 135", r"27,\, 54,\, 108"),
    "set": (r"\{1,2\}", r"\{2, 1\}", "(1,2)"),
    "interval": (r"(-\infty, 3)", "x<3", r"(-\infty, 3]"),
    "union": (r"(1,2) \cup (3,4)", r"(3,4)\cup(1,2)", r"(1,2) \cup (3,5)"),
    "matrix": (
        r"\begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix}",
        r"\begin{pmatrix}-\frac13\\ \frac23\end{pmatrix}",
        "(-1/3)",
    ),
    "tiny": (r"\frac{1}{2^{99}}", "2^{-99}", r"\frac{1}{2^{98}}"),
    "line": ("x+y=3", "y=3-x", "x-y=3"),
    "tinier": (r"\frac{1}{2004!}", r"\frac{1}{2005!/2005}", r"\frac{1}{2006!}"),
    "tiny decimal": ("0.00000016", r"1.6 \times 10^{-7}", "0.00000032"),
    "tiny pair": ("(1e-9, 2)", r"(10^{-9}, 2)", "(2e-9, 2)"),
    "rounded": (r"\frac{1}{6}", "0.166667", "0.16667"),
    "integer": ("5", "5.0", "5.0000001"),
    "zero": ("0", "0.0", "10^{-40}"),
    "identity": (
        r"\ln \left(\frac{1}{\sqrt{e}}\right)=-\frac{1}{2}",
        r"\ln(\frac{1}{\sqrt{e}}) = -\frac12",
        r"\log_{2}(32)=5",
    ),
    "vectors": (
        r"y=c\begin{bmatrix} 0 \\ 1 \end{bmatrix}",
        r"y = c \begin{bmatrix}0\\1\end{bmatrix}",
        r"y=c\begin{bmatrix} 1 \\ 2 \end{bmatrix}",
    ),
    "sentence with a number": (
        "multiplied by 2, so it is doubled",
        "multiplied by 2, so it is doubled.",
        r"\frac{1}{2}",
    ),
    "equation": ("y=2x+1", "2x+1", "y=x+2"),
    "dollars": ("$\\frac{1}{2 n+2}$", r"\frac{1}{2(n+1)}", r"\frac{1}{2n+1}"),
    "dollars within": ("20 $cm^{2}$", "20 cm^2", "21 $cm^{2}$"),
    "no LaTeX": (r"x_{0} \cos (t)+$ $\dot{x}_{0} / \omega", r"x_0\cos(t)+\dot{x}_0/\omega", "x_0"),
}


@pytest.mark.parametrize("form", GROUND_TRUTHS)
def test_a_ground_truth_is_right_against_itself_and_wrong_against_another(math, form):
    truth, respelled, wrong = GROUND_TRUTHS[form]
    for answer in (truth, respelled):
        assert ask(math.required, f"so \\boxed {{{answer}}}", truth) == RIGHT, answer
    assert ask(math.compute_score, f"We count. The answer is {truth}. That is all.", truth) == RIGHT
    assert ask(math.required, f"so \\boxed{{{wrong}}}", truth) == WRONG
    assert ask(math.compute_score, f"We count. The answer is {wrong}. That is all.", truth) == WRONG


@pytest.mark.parametrize(
    ("ground_truth", "answer"),
    [(r"|x|\sqrt[3]{x}", r"x\sqrt[3]{x}"), (r"2\sqrt{x^2}", r"x+\sqrt{x^2}")],
)
def test_a_letter_that_may_be_negative_is_not_taken_for_positive(math, ground_truth, answer):
    assert ask(math.required, f"\\boxed{{{answer}}}", ground_truth) == WRONG


CHOICES = {  # answers, by whether they choose A
    True: [
        "A",
        "(A).",
        "A. Rome",
        "A) Rome",
        "(A) Rome",
        "A: Rome",
        "A - Rome",
        "A – none of these",
        "(A) 12",
        "(A) (1, 2)",
        r"(A) \frac12",
        r"\text{(A) Rome}",
        r"\textbf{(A)}\ \text{Rome}",
        "option A",
        "(A) B, C and D turn right",
        "(A) All of the above",
    ],
    False: [
        "Rome",
        "Actually Rome",
        "A cat",
        "A:B",
        "A - x",
        "(A) or (B)",
        "A and B",
        "A, B",
        "(A)(B)",
        "B. Ankara",
        "(B) A, C and D turn right",
    ],
}


@pytest.mark.parametrize(
    ("answer", "chosen"), [(answer, chosen) for chosen, answers in CHOICES.items() for answer in answers]
)
def test_a_choice_with_words_is_compared_by_its_letter(math, answer, chosen):
    expected = RIGHT if chosen else WRONG
    assert ask(math.required, f"\\boxed{{{answer}}}", "A") == expected
    assert ask(math.compute_score, f"We look at each. The answer is {answer}", "A") == expected
    assert ask(math.compute_score, f"**ANSWER:** {answer}", "A") == expected


@pytest.fixture(scope="module")
def crossmatch():
    """The module that makes the cross-match table."""
    path = Path(__file__).parents[2] / "lab/benchmarks/crossmatch.py"
    spec = importlib.util.spec_from_file_location("crossmatch", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("form", GROUND_TRUTHS)
def test_a_ground_truth_is_right_in_five_spellings_and_its_near_misses_are_wrong(math, crossmatch, form):
    truth = GROUND_TRUTHS[form][0]
    for spell in crossmatch.SPELLINGS.values():
        assert (text := spell(truth)) is None or ask(math.compute_score, text, truth) == RIGHT, text
    for change in crossmatch.NEAR_MISSES.values():
        assert (near := change(truth)) is None or ask(math.compute_score, f"\\boxed{{{near}}}", truth) == WRONG, near


def test_near_misses_are_what_their_names_say(crossmatch):
    nears = {
        truth: [change(truth) for change in crossmatch.NEAR_MISSES.values()]
        for truth in ("-12", r"\frac{3}{4}", "(1,2)", "C", "0", "east")
    }
    assert nears == {
        "-12": ["-22", "12", "-1", r"\frac{1}{-12}"],
        r"\frac{3}{4}": [r"\frac{4}{4}", r"-\frac{3}{4}", None, r"\frac{4}{3}"],
        "(1,2)": ["(2,2)", None, "(1)", None],
        "C": ["(D)", "-C", None, None],
        "0": ["1", None, None, None],
        "east": [None, None, None, None],
    }


BOXES = {  # a right answer, by what is asked for
    r"\boxed{4}": {"required", "preferred", "any"},
    "The answer is 4.": {"preferred", "any"},
    "so $4$": {"preferred", "any"},
    r"The answer is 4. No, \boxed{3}": {"any"},
    r"\boxed{4": set(),
    r"The answer is 4: \boxed{4": set(),
    r"\boxed{4}, or rather \boxed{3": set(),
    r"\boxed{}": set(),
    r"\fbox{4}": {"required", "preferred", "any"},
    r"$\boxed 4$, by 3 steps": {"required", "preferred", "any"},
    r"\boxed{4}, no: \fbox{3}": set(),
    r"\fbox{4": set(),
}


@pytest.mark.parametrize("completion", BOXES)
@pytest.mark.parametrize("boxed_is", ["required", "preferred", "any"])
def test_the_answer_is_looked_for_in_the_place_that_was_named(math, completion, boxed_is):
    expected = RIGHT if boxed_is in BOXES[completion] else WRONG
    assert ask(math.MathVerify(boxed=boxed_is), completion, "4") == expected


def test_an_unknown_place_for_answers_is_refused(math):
    with pytest.raises(ValueError, match="boxed must be one of required, preferred, any, got 'always'"):
        math.MathVerify(boxed="always")


def test_out_of_memory_is_not_wrong(math, monkeypatch):
    def no_memory(*_, **__):
        raise MemoryError

    monkeypatch.setattr(math, "verify", no_memory)
    assert ask(math.compute_score, r"\boxed{x+2}", "x+1") == Unscored("MemoryError: ")


HOSTILE_ANSWERS = [
    "",
    "{",
    "}",
    "\\",
    r"\frac",
    r"\frac{1}{0}",
    r"\frac{}{}",
    r"\sqrt{",
    r"\boxed{\boxed{}}",
    r"\left(",
    "1e99999999",
    "1/0",
    "0/0",
    r"\infty - \infty",
    "nan",
    "10^{-99999}",
    "٤",
    "４",
    "4" * 1000,
    "{" * 20 + "5" + "}" * 20,
    r"\text{" * 50 + "5" + "}" * 50,
    "4 4",
    "$" * 1000,
    "4,,,,",
    "\0",
    "\ud800",
    "4\u0307",
    "__import__('os')",
    "x" * 3000,
    ",".join("123456789"),
    r"\sum_{i=1}^{3} i",
    "(" * 50,
    "4%%%",
    "--4",
]


@pytest.mark.parametrize("answer", HOSTILE_ANSWERS)
def test_a_hostile_answer_is_not_right(math, answer):
    for text in (f"\\boxed{{{answer}}}", f"The answer is {answer}"):
        assert ask(math.MathVerify(timeout_s=1), text, "4/7") != RIGHT
        assert ask(numeric, text, "4/7") != RIGHT


def test_a_comparison_that_takes_too_long_is_unscored_not_wrong(math):
    assert ask(math.MathVerify(timeout_s=1), r"\boxed{9^{9^{9^{9}}}}", "4") == Unscored(
        "TimeoutError: math-verify took more than 1 s"
    )


def test_a_ground_truth_that_is_no_mathematics_is_unscored(math):
    outcome = ask(math.compute_score, r"\boxed{4}", "")
    assert outcome == Unscored("ValueError: ground truth '' is empty; mathematical rewards need a ground truth")


def test_outside_the_main_thread_mathematics_is_refused(math):
    outcomes = []
    thread = Thread(target=lambda: outcomes.append(ask(math.compute_score, r"\boxed{4}", "4")))
    thread.start()
    thread.join()
    assert "main thread only; score with WorkerScorer" in outcomes[0].reason


def test_without_math_verify_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    monkeypatch.delitem(sys.modules, "rollalloc.rewards.math", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'rollalloc\[rewards\]'"):
        load_reward("rollalloc.rewards.math:compute_score")
