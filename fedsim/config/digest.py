"""The release digest: a name for all in a config that determines what a run releases."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic.fields import FieldInfo

from fedsim.config.choices import Choice, takers
from fedsim.config.keys import Section
from fedsim.config.run_config import RunConfig
from fedsim.errors import FedsimError
from fedsim.privacy.digest import digest_of

__all__ = ["affects_release", "release_digest"]


def release_digest(config: RunConfig) -> str:
    """Digest of a config whose noise multipliers and entropy are resolved.

    Two configs of one digest release the same, and draw the same noise for it. Where the
    examples lie and what they are, and the code of the user's own classes, are outside.

    Raises
    ------
    FedsimError
        If something is not resolved, as `Build.resolved` does it.
    """
    for key, value, wanted in (
        ("noise.target-epsilon", config.noise.target_epsilon, None),
        ("client.noise.target-epsilon", config.client.noise.target_epsilon, None),
        ("noise.entropy", config.noise.entropy or None, config.noise.entropy or "resolved"),
    ):
        if value != wanted:
            raise FedsimError(f"{key} is {value!r}; a release digest is of a resolved config.")
    kept = {key for key, affects in _keys(type(config)) if affects}
    return digest_of({key: value for key, value in config.to_run_config().items() if key in kept})


def affects_release(key: str) -> bool:
    """Whether a change of this dotted key may change what a run releases.

    Raises
    ------
    FedsimError
        If there is no such key.
    """
    keys = dict(_keys(RunConfig))
    if key not in keys and not _is_a_things(key):
        raise FedsimError(f"there is no key {key} in a config.")
    return keys.get(key, True)


def _is_a_things(key: str) -> bool:
    """Whether it is a setting of something that a table may name: all of those affect releases."""
    section: type[Section] = RunConfig
    *tables, last = key.split(".")
    for table in tables:
        inner = next(
            (f.annotation for f in section.model_fields.values() if f.alias == table), None
        )
        if not (isinstance(inner, type) and issubclass(inner, Section)):
            return False
        section = inner
    return issubclass(section, Choice) and (last == "options" or bool(takers(section, last)))


def _keys(
    table: type[Section], prefix: str = "", affects: bool = True
) -> Iterator[tuple[str, bool]]:
    """Each dotted key below a table, and whether its declaration and its table's say so."""
    for field in table.model_fields.values():
        key, counts = f"{prefix}{field.alias}", affects and _declared(field)
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            yield from _keys(inner, f"{key}.", counts)
        else:
            yield key, counts


def _declared(field: FieldInfo) -> bool:
    extra = field.json_schema_extra
    return not isinstance(extra, dict) or bool(extra.get("affects-release", True))
