"""The seams into SGLang's MiniMax-H3: packed document, attention, block stack, decode residency, kernel stand-ins."""
