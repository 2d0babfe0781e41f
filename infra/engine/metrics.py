"""Prometheus text as a dictionary."""

# Labels that every sample of one engine shares.
_COMMON = {"model_name", "engine"}


def parse(text: bytes) -> dict[str, float]:
    """Samples by name; labels that tell samples apart follow in braces, as in `name{position="0"}`."""
    from prometheus_client.parser import text_string_to_metric_families

    samples = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = ",".join(f'{k}="{v}"' for k, v in sorted(sample.labels.items()) if k not in _COMMON)
            samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return samples
