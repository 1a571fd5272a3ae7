"""Trust files and policies."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from securesystemslib.signer import CryptoSigner

from config.errors import SolError, UsageError
from tests.verify.conftest import Signed
from verify.keys import keygen
from verify.policy import AllOf, AnyOf, Evidence, ForTargets, InImages, SignedBy, load_policy
from verify.report import verify_record

ONE, OTHER = (CryptoSigner.generate_ed25519().public_key for _ in range(2))
IMAGE = "sha256:" + "1" * 64


def evidence(key: object = ONE, target: str = "cpu", image: str = IMAGE) -> Evidence:
    return Evidence(key.keyid, target, image)  # type: ignore[attr-defined]


def test_policies_compose() -> None:
    lab = AllOf([SignedBy("lab", ONE), ForTargets(("cpu", "h200")), InImages((IMAGE,))])
    policy = AnyOf([lab, SignedBy("other", OTHER)])
    assert policy.unmet(evidence()) is None and policy.unmet(evidence(OTHER, "x", "")) is None
    for wrong, word in ((evidence(target="x"), "target 'x'"), (evidence(image=""), "image 'none'")):
        assert word in (policy.unmet(wrong) or "")
    third = CryptoSigner.generate_ed25519().public_key
    assert "lab" in (policy.unmet(evidence(third)) or "") and "other" in (policy.unmet(evidence(third)) or "")


@pytest.mark.parametrize("kind", [AllOf, AnyOf])
def test_policy_without_parts_is_an_error(kind) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError, match="without parts"):
        kind([])


def write(folder: Path, text: str) -> Path:
    path = folder / "trust.toml"
    path.write_text(text)
    return path


def test_keys_by_file_and_inline(tmp_path: Path) -> None:
    _, public, keyid = keygen(tmp_path / "k")
    inline = f'[[keys]]\nname = "x"\npublic = "{ONE.keyval["public"]}"\n'
    policy = load_policy(write(tmp_path, f'threshold = 1\n[[keys]]\nname = "lab"\npem = "{public.name}"\n{inline}'))
    assert policy.unmet(Evidence(keyid, "cpu", "")) is None and policy.unmet(evidence()) is None
    assert policy.unmet(evidence(OTHER)) is not None


BAD = {
    "empty": "",
    "no keys": "threshold = 1\nkeys = []\n",
    "threshold": f'threshold = 2\n[[keys]]\nname = "x"\npublic = "{ONE.keyval["public"]}"\n',
    "threshold 0": f'threshold = 0\n[[keys]]\nname = "x"\npublic = "{ONE.keyval["public"]}"\n',
    "neither": '[[keys]]\nname = "x"\n',
    "both": f'[[keys]]\nname = "x"\npem = "k"\npublic = "{ONE.keyval["public"]}"\n',
    "no name": f'[[keys]]\npublic = "{ONE.keyval["public"]}"\n',
    "unknown key": f'[[keys]]\nname = "x"\nkey = 1\npublic = "{ONE.keyval["public"]}"\n',
    "not hex": '[[keys]]\nname = "x"\npublic = "zz"\n',
    "absent file": '[[keys]]\nname = "x"\npem = "absent.pub"\n',
    "no targets": f'[[keys]]\nname = "x"\ntargets = []\npublic = "{ONE.keyval["public"]}"\n',
    "image by tag": f'[[keys]]\nname = "x"\nimages = ["sol:latest"]\npublic = "{ONE.keyval["public"]}"\n',
    "twice": f'[[keys]]\nname = "x"\npublic = "{ONE.keyval["public"]}"\n' * 2,
    "not TOML": "[[keys",
}


@pytest.mark.parametrize("name", BAD)
def test_trust_file_that_would_trust_nobody_or_too_many_is_an_error(signed: Signed, tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="trust|policy|key"):
        verify_record(signed.record, write(tmp_path, BAD[name]))


def test_trust_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(UsageError):
            load_policy(path)


LINES = [
    *("[[keys]]", "threshold = 1", "targets = [1]", "keys = 3", "images = [[]]"),
    *('name = "x"', 'public = "00"', 'pem = "."'),
]


@settings(max_examples=300)
@given(st.binary(max_size=120) | st.lists(st.sampled_from(LINES), max_size=6).map(lambda x: "\n".join(x).encode()))
def test_trust_file_parser_ends_in_a_policy_or_a_clear_error(tmp_path_factory, data: bytes) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path_factory.mktemp("trust") / "t"
    path.write_bytes(data)
    try:
        load_policy(path)
    except SolError:
        pass


def test_target_and_image_of_the_record_are_what_counts(signed: Signed, tmp_path: Path) -> None:
    public = signed.key.with_name(signed.key.name + ".pub").name
    key = f'[[keys]]\nname = "lab"\npem = "{public}"\n'
    for extra, verdict in (
        ('targets = ["cpu"]', "PASSED"),
        ('targets = ["rtx4090"]', "UNTRUSTED"),
        (f'images = ["{IMAGE}"]', "PASSED"),
        (f'images = ["sha256:{"2" * 64}"]', "UNTRUSTED"),
    ):
        report = verify_record(signed.record, write(signed.key.parent, key + extra + "\n"))
        assert report.verdict == verdict, report.trust_reason
