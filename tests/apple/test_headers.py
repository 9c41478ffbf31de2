"""The stand-in's Metal headers, and the Foundation in this folder, against Apple's own account of its frameworks."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import objc_api
from .conftest import replace

HEADERS = ("Foundation/Foundation.h", "Metal/Metal.h", "MetalPerformanceShaders/MetalPerformanceShaders.h")
PREFIXES = ("MTL", "MPS", "NS")


def differences(frameworks: Path) -> list[str]:
    return objc_api.differences(objc_api.declared(frameworks, HEADERS, PREFIXES), objc_api.apple())


def test_headers_declare_what_apple_declares(frameworks: Path) -> None:
    assert differences(frameworks) == []


def test_most_of_it_is_checked_with_types(frameworks: Path) -> None:
    """A method of which only the selector is known passes with any types: few may be like that."""
    declared, apple = objc_api.declared(frameworks, HEADERS, PREFIXES), objc_api.apple()
    methods = [(owner, method) for owner, methods in declared.methods.items() for method in methods]
    by_name_alone = [f"{owner} {method[1]}" for owner, method in methods if not apple.encodings(owner, method)]
    assert len(methods) > 150 and len(declared.enums) > 140
    assert all(name.startswith(("MPSCommandBuffer ", "NS")) for name in by_name_alone), by_name_alone


FAULTS = {
    "a selector": (
        "Metal/MTLComputeCommandEncoder.h",
        "setBufferOffset:(NSUInteger)offset",
        "setBufferShift:(NSUInteger)offset",
        "-[MTLComputeCommandEncoder setBufferShift:atIndex:]: Apple declares no such method",
    ),
    "the type of a property": (
        "Metal/MTLBuffer.h",
        "@property(readonly) NSUInteger length;",
        "@property(readonly) uint32_t length;",
        "-[MTLBuffer length]: encoding I@:; Apple's is Q@:",
    ),
    "the type of an argument": (
        "Metal/MTLCommandBuffer.h",
        "waitUntilCompleted;",
        "waitUntilCompleted:(int)seconds;",
        "-[MTLCommandBuffer waitUntilCompleted:]: Apple declares no such method",
    ),
    "a method of another class": (
        "Metal/MTLBuffer.h",
        "- (nonnull void*)contents;",
        "- (nonnull void*)contents;\n- (void)endEncoding;",
        "-[MTLBuffer endEncoding]: Apple declares no such method, which MTL",
    ),
    "a member of a struct": (
        "Metal/MTLTypes.h",
        "NSUInteger width, height, depth;",
        "NSUInteger width, height;\n  unsigned depth;",
        "-[MTLComputeCommandEncoder dispatchThreads:threadsPerThreadgroup:]: encoding v@:{QQI}{QQI}",
    ),
    "the value of an enum constant": (
        "Metal/MTLFunctionConstantValues.h",
        "MTLDataTypeBool = 53,",
        "MTLDataTypeBool = 54,",
        "MTLDataTypeBool = 54; Apple's is 53",
    ),
    "an enum constant": (
        "Metal/MTLDevice.h",
        "MTLGPUFamilyMetal3 = 5001,",
        "MTLGPUFamilyMetal9 = 5009,",
        "MTLGPUFamilyMetal9: Apple declares no such enum constant",
    ),
    "a function": (
        "Metal/MTLDevice.h",
        "MTLCopyAllDevices(void)",
        "MTLCopyEveryDevice(void)",
        "MTLCopyEveryDevice: Apple declares no such function or constant",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_finds_what_is_wrong_in(fault: str, planted: Path) -> None:
    file, old, new, expected = FAULTS[fault]
    replace(planted / file, old, new)
    assert [line for line in differences(planted) if expected in line]
