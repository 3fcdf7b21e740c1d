"""The definitions, one module per family. Importing this package imports every family, which registers its losses."""

import importlib
import pkgutil

for _family in sorted(x.name for x in pkgutil.iter_modules(__path__)):
    importlib.import_module(f"{__name__}.{_family}")
