"""The base of every configuration section: strict, described, immutable."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A group of settings. Unknown keys are refused, defaults are checked, instances do not change."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        use_attribute_docstrings=True,
        hide_input_in_errors=True,  # what was given may be secret, and errors are logged
        coerce_numbers_to_str=True,  # `--set target.base_version=1`
    )
