"""Antibody generators: four architectures behind one `AntibodyGenerator`."""
